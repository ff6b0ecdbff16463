# tests: training/step/micro_batches.py
"""Checks that a step in parts computes no more than a step in one pass, by compiled HLO."""

import pytest

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation

MESHES = {
    "data_tensor": "data=2,model=4",
    "zero1_tensor": "data=2,model=4",
    "zero1_sequence_tensor": "data=2,model=4",
    "fsdp_sequence_tensor": "data=2,model=4",
    "fsdp": "data=4",
}


def flops(strategy: str, micro_batches: int, activation: str) -> int:
    """Returns the FLOPs of all products of a step on one device."""
    values = {
        "execution": loop("products"),
        "moe_every": 0,
        "layer.feed_forward.activation": activation,
    }
    trainer = tiny_translation.trainer(stack_values=values, micro_batches=micro_batches)
    partitioning = Partitioning.make(MESHES[strategy], strategy)
    runtime = SpmdRuntime(trainer, partitioning, devices_for(partitioning.mesh.size))
    runtime.init_state()
    runtime.train_step(tiny_translation.batch(0))
    return sum(
        operation.times * operation.matmul_flops
        for operation in runtime.executable("train").operations().operations
    )


@pytest.mark.parametrize(
    ("strategy", "activation"),
    [
        ("zero1_sequence_tensor", "relu"),
        # The splits of gelu's operations are not followed.
        pytest.param("data_tensor", "gelu", marks=pytest.mark.slow),
        *(pytest.param(strategy, "swiglu", marks=pytest.mark.slow) for strategy in MESHES),
    ],
)
def test_parts_of_a_batch_compute_what_the_batch_does(strategy, activation):
    parts, whole = (flops(strategy, count, activation) for count in (2, 1))
    assert parts == pytest.approx(whole, rel=0.02)
