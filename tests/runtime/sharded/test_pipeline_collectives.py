# tests: wings/pipeline/pipeline.py, wings/pipeline/pipeline_loop.py
"""Tests the results, cost and communication of pipelines over a mesh axis."""

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.repeat.loop import Repeat

B, L, M = 16, 8, 16
PIPELINE = {"stages": 4, "micro_batches": 8}


@dataclasses.dataclass(frozen=True)
class Ran:
    """Output and gradients of a stack's layers, and their compiled HLO."""

    layer: TransformerStack
    results: list[np.ndarray]
    collectives: list[hlo.CollectiveCall]
    flops: dict[str, int]

    def gradients(self) -> dict[str, np.ndarray]:
        """Returns the weight gradients of every layer by their names without loops or stages."""
        found = {}
        specs = self.layer.variable_specs().flatten()
        for spec, gradient in zip(specs, self.results[2:], strict=True):
            slices = gradient.reshape(-1, *spec.shape[spec.stacked :])
            found.update(zip(spec.slices, slices, strict=True))
        return found


@functools.cache
def ran(mesh: str, strategy: str, stack: tuple, stages: tuple) -> Ran:
    """Runs a stack forward and backward on a mesh.

    stack: options of the stack. stages: those of a pipeline; () for a loop.
    """
    execution = Pipeline.params().set(**dict(stages)) if stages else Repeat.params()
    moe = MixtureOfExperts.params().set(num_experts=4, group_size=L)
    p = TransformerStack.params().set(num_layers=4, model_dim=M, num_heads=2, hidden_dim=32)
    p.set(moe_every=0, moe=moe)
    p.moe.router.set(capacity_factor=4.0, second_expert="all")
    layer = p.set(execution=execution, **dict(stack)).instantiate(path="encoder").layers
    specs = layer.variable_specs()

    def run(theta, x, d):
        theta, x, d = annotate_weights(theta, specs), annotate(x, "BLM"), annotate(d, "BLM")
        with context.scope(training=True, seed=tf.constant([1, 2])), tf.GradientTape() as tape:
            tape.watch((theta, x))
            mask = AttentionMask(tf.ones([B, L], tf.int32), bias_B1LK=tf.zeros([B, 1, L, L]))
            y = layer.fprop(theta, x, (mask,))
        d_theta, dx = tape.gradient(y, (theta, x), d)
        return annotate(y, "BLM"), annotate(dx, "BLM"), annotate_weights(d_theta, specs)

    rng = np.random.default_rng(0)
    x, d = rng.normal(size=(2, B, L, M)).astype(np.float32)
    theta = layer.init(1).transform(lambda w: w.numpy())
    function = partition(run, mesh, strategy)
    executable = function.compile(theta, x, d)
    flops = collections.Counter()
    for operation in executable.operations().operations:
        flops[operation.phase] += operation.times * operation.matmul_flops
    results = [np.asarray(y) for y in tf.nest.flatten(function(theta, x, d))]
    return Ran(layer, results, executable.collectives(), flops)


def unpipelined(**options: object) -> Ran:
    return ran("data=8", "data", tuple(options.items()), ())


def pipelined(circulations: int = 1, **options) -> Ran:
    stages = {**PIPELINE, "circulations": circulations}
    return ran("stage=4,data=2", "data_pipeline", tuple(options.items()), tuple(stages.items()))


def assert_same(actual: Ran, expected: Ran) -> None:
    for one, other in zip(actual.results[:2], expected.results[:2], strict=True):
        assert_close(one, other, "order")
    gradients = actual.gradients()
    assert set(gradients) == set(expected.gradients())
    for name, gradient in expected.gradients().items():
        assert_close(gradients[name], gradient, "order")


def assert_no_more_than_bubbles(found: Ran, expected: Ran, useful: int, ticks: int) -> None:
    """All stages compute in all ticks, in `useful` of which each has something to compute."""
    for phase in ("forward", "backward"):
        assert found.flops[phase] * useful == expected.flops[phase] * ticks
    assert found.flops["rematerialized"] == 0


@pytest.mark.slow
def test_pipeline_equals_the_loop_and_costs_only_bubbles():
    assert_same(pipelined(), unpipelined())
    assert_no_more_than_bubbles(pipelined(), unpipelined(), useful=8, ticks=11)


@pytest.mark.slow
def test_communication_of_a_pipeline():
    """A permute each way; rows are put together for the stages, and handed out after them.

    Gradients are summed over the devices with the same weights once, whatever the ticks.
    """
    found = pipelined().collectives
    inside = [c for c in found if c.times > 1]
    assert hlo.count_by_kind(inside) == {"collective-permute": 2}
    assert [c.bytes for c in inside] == [B // 8 // 2 * L * M * 4] * 2
    of_data = [c for c in found if "data" in c.axes]
    assert hlo.count_by_kind(of_data) == {"all-reduce": 1}
    weights = pipelined().layer.variable_specs().flatten()
    assert of_data[0].bytes == sum(np.prod(spec.shape) for spec in weights) // 4 * 4
    outside = [c for c in found if c not in inside + of_data]
    assert max(c.bytes for c in outside) <= B // 2 * L * M * 4
    assert sum(c.bytes for c in outside) <= 5 * (B // 2 * L * M * 4)


@pytest.mark.slow
def test_gradients_of_several_layers_of_a_stage_are_summed_over_devices_once():
    found = pipelined(num_layers=8)
    assert_same(found, unpipelined(num_layers=8))
    assert [c.times for c in found.collectives if "data" in c.axes] == [1]


@pytest.mark.slow
def test_circulations_have_smaller_bubbles():
    found = pipelined(num_layers=8, circulations=2)
    expected = unpipelined(num_layers=8)
    assert_same(found, expected)
    assert_no_more_than_bubbles(found, expected, useful=16, ticks=19)
    inside = [c for c in found.collectives if "while/" in c.op_name]
    assert "all-gather" not in hlo.count_by_kind(inside)


@pytest.mark.slow
def test_expert_and_tensor_parallelism_within_stages():
    options, stages = (("moe_every", 2),), (("stages", 2), ("micro_batches", 4))
    one = ran("data=1", "replicated", options, ())
    found = ran("stage=2,data=2,model=2", "expert_pipeline_tensor", options, stages)
    assert_same(found, one)
    experts = [c for c in found.collectives if c.kind == "all-to-all" and "while/" in c.op_name]
    assert len([c for c in experts if "gradient_tape" not in c.op_name]) == 2
