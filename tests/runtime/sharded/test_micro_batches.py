# tests: wings/optimizers/micro_batches.py
"""Checks that a step in parts computes no more than a step in one pass, by compiled HLO."""

import pytest

from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation, trainings

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
    runtime = trainings.on_mesh(trainer, MESHES[strategy], strategy)
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
