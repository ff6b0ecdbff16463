"""Checks that annotations become Shardy constraints with the same sharding."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.spmd import SpmdOptions, SpmdRuntime
from lingvo_gshard.sharding import annotate, paper_api
from lingvo_gshard.sharding.manual import manual
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from tests.runtime import tiny_translation

MESH = Mesh.parse("data=2,model=4")


def _matmul_program(partitioner: str) -> Executable:
    partitioning = Partitioning.make("data=8", "B->data")
    inputs = [
        Array("x", (16, 8), "float32", partitioning.split("BM")),
        Array("w", (8, 4), "float32", partitioning.split("MH")),
    ]

    def function(x, w):
        product = annotate(tf.matmul(annotate(x, "BM"), w), "BH")
        return [("total", tf.reduce_sum(product, 0), ((),))]

    return Executable(
        lower("product", function, inputs, partitioning, (), partitioner), devices_for(8)
    )


def test_shardy_and_gspmd_partition_alike():
    compiled = {name: _matmul_program(name) for name in ("gspmd", "shardy")}
    assert "falling back" not in compiled["shardy"].compiler_output
    counts = [hlo.count_by_kind(c.collectives()) for c in compiled.values()]
    assert counts == [{"all-reduce": 1}] * 2
    x, w = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)
    for executable in compiled.values():
        (total,) = executable(x, w[:8, :4])
        np.testing.assert_allclose(total, (x @ w[:8, :4]).sum(0), rtol=1e-5)


def test_explicit_device_lists_are_rejected():
    partitioning = Partitioning.make("data=8", "B->data")

    def function(x):
        return [("x", paper_api.shard(x, np.arange(8)[::-1].reshape(8, 1)), None)]

    inputs = [Array("x", (16, 8), "float32", ((), ()))]
    with pytest.raises(ValueError, match="`partitioner=shardy`"):
        lower("reversed", function, inputs, partitioning, (), "shardy")


def test_manual_regions_are_refused():
    partitioning = Partitioning.make("data=8", "B->data")
    region = manual(lambda x: 2.0 * x, [(("data",), ())], (("data",), ()))
    inputs = [Array("x", (16, 8), "float32", ((), ()))]
    with pytest.raises(ValueError, match="shardy` cannot partition manual regions.* Use .*gspmd"):
        lower("doubled", lambda x: [("x", region(x), None)], inputs, partitioning, (), "shardy")


def test_a_model_with_manual_regions_is_refused_before_it_is_traced():
    partitioning = Partitioning.make("data=8", "expert")
    trainer = tiny_translation.trainer(stack_values={"moe.dispatch": DroplessDispatch.params()})
    runtime = SpmdRuntime(trainer, partitioning, devices_for(8), SpmdOptions(partitioner="shardy"))
    with pytest.raises(ValueError, match=r"encoder.layers\[1\].feed_forward .*partitioner=gspmd"):
        runtime.init_state()
