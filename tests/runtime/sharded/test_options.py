# tests: runtime/spmd.py, sharding/strategies.py, training/step/trainer.py
"""Checks that every strategy and training option trains on eight devices as on one."""

import functools

import pytest

from tests.layers.stacks.executions import loop, sequential
from tests.runtime import tiny_translation, trainings

STEPS = 3
STRATEGIES = [
    ("data", "data=8"),
    ("expert", "data=8"),
    ("fsdp", "data=8"),
    ("zero1", "data=8"),
    ("tensor", "model=8"),
    ("expert_tensor", "data=4,model=2"),
    ("folded_tensor", "data=4,model=2"),
    ("expert_fsdp_tensor", "data=2,fsdp=2,model=2"),
]
OPTIONS = {
    "accumulation": {"micro_batches": 2},
    "rematerialization": {"stack_values": {"execution": sequential("products_but_hidden")}},
    "repeat": {"stack_values": {"execution": loop(), "num_layers": 4}},
    "bfloat16": {"precision": "bfloat16"},
}
# Devices round their partial sums to the 8 bits of bfloat16.
TOLERANCES = {name: 2e-2 if name == "bfloat16" else 1e-4 for name in OPTIONS}


@functools.cache
def locally(option: str) -> list[dict[str, float]]:
    trainer = tiny_translation.trainer(**OPTIONS[option])
    return trainings.train(trainings.on_one_device(trainer), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), STRATEGIES)
@pytest.mark.parametrize("option", OPTIONS)
def test_trains_as_on_one_device(option, strategy, mesh):
    trainer = tiny_translation.trainer(**OPTIONS[option])
    found = trainings.train(trainings.on_mesh(trainer, mesh, strategy), STEPS)
    names = ("loss", "cross_entropy", "gradient_norm")
    trainings.assert_same_metrics(found, locally(option), TOLERANCES[option], names)
