# tests: wings/spmd_passes/uneven_sums.py, wings/spmd_passes/builders.py
# tests: wings/spmd_passes/value_splits.py
"""Checks that sums which are split in unequal shards are reduced to these shards only."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.runtime.program import step_programs
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.planning.machines import cuda, topologies
from lingvo_gshard.wings.spmd_passes import uneven_sums
from tests.layers.stacks.executions import loop

B, L, N, D = 12, 4, 4, 3


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def products(x_BLM, d_BLND, d_BLH):
    """Returns gradients: one whole, one transposed, and three slices of one product."""
    x = annotate(x_BLM, "BLM")
    d_BLND, d_BLH = annotate(d_BLND, "BLND"), annotate(d_BLH, "BLH")
    whole = annotate(einsum("BLM,BLND->MND", x, d_BLND), "MND", "weights")
    transposed = annotate(einsum("BLM,BLH->HM", x, d_BLH), "HM", "weights")
    both = einsum("BLM,BLH->MH", x, d_BLH)
    half = both.shape[1] // 2
    starts = (0, 1, half)
    parts = [annotate(both[:, i : i + half], "MH", "weights") for i in starts]
    return whole, transposed, *parts


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize(
    ("mesh", "strategy"), [("data=6", "fsdp"), ("data=3,model=2", "fsdp_tensor")]
)
def test_values_are_those_of_one_device(monkeypatch, mesh, strategy, partitioner):
    padded = []
    pad = uneven_sums._padded
    monkeypatch.setattr(
        uneven_sums, "_padded", lambda value, shape: padded.append(shape) or pad(value, shape)
    )
    # Over 6 and over 3 devices M of 32 is padded to 36 and to 33.
    arguments = array(B, L, 32), array(B, L, N, D), array(B, L, 16)
    expected = partition(products, "data=1")(*arguments)
    assert not padded
    found = partition(products, mesh, strategy, partitioner=partitioner)(*arguments)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert len(padded) == 5


def test_even_sums_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(uneven_sums, "_padded", None)
    arguments = array(B, L, 36), array(B, L, N, D), array(B, L, 16)
    found = partition(products, "data=6", "fsdp")(*arguments)
    expected = np.einsum("blm,blnd->mnd", *arguments[:2])
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(cuda.installed() is None, reason="XLA's GPU compiler is missing")
def test_gpus_reduce_gradients_to_the_parts_of_a_padded_state():
    rows, length, model_dim, hidden_dim, layers, devices = 12, 128, 256, 1020, 4, 6
    task = LanguageModelTask.params().set(vocabulary_size=66, model_dim=model_dim)
    task.decoder.set(num_layers=layers, num_heads=2, hidden_dim=hidden_dim, moe_every=0)
    task.decoder.execution = loop("full")
    trainer = Trainer.params().set(precision="bfloat16").instantiate(task)
    names = ("inputs", "labels", "positions", "segments")
    batch = {f"target_{name}": tf.TensorSpec((rows, length), tf.int32) for name in names}
    partitioning = Partitioning.make(f"data={devices}", "zero1").with_padded_state()
    program, _ = step_programs.train_program(trainer, partitioning, "gspmd", batch)
    machine = topologies.get(f"gpu:h100:{devices}x1").compile_devices()
    found = {"all-reduce": 0.0, "reduce-scatter": 0.0}
    for call in Executable(program, machine).collectives():
        if call.kind in found and call.dtype == "bfloat16":
            found[call.kind] += call.bytes * call.times
    matrices = 2 * layers * (4 * model_dim**2 + 2 * model_dim * hidden_dim)
    assert found["reduce-scatter"] >= matrices / devices
    assert found["all-reduce"] <= 0.05 * matrices
