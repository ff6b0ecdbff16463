# tests: runtime/spmd.py, sharding/strategies.py, training/step/trainer.py
"""Checks that every strategy and training option trains on eight devices as on one."""

import functools

import numpy as np
import pytest

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from tests.layers.stacks.executions import loop, sequential
from tests.runtime import tiny_translation

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
    return losses(SingleDeviceRuntime(tiny_translation.trainer(**OPTIONS[option])))


def losses(runtime: SingleDeviceRuntime | SpmdRuntime) -> list[dict[str, float]]:
    runtime.init_state()
    return [runtime.train_step(tiny_translation.batch(i)).read() for i in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), STRATEGIES)
@pytest.mark.parametrize("option", OPTIONS)
def test_trains_as_on_one_device(option, strategy, mesh):
    partitioning = Partitioning.make(mesh, strategy)
    trainer = tiny_translation.trainer(**OPTIONS[option])
    found = losses(SpmdRuntime(trainer, partitioning, devices_for(partitioning.mesh.size)))
    for step, (mine, theirs) in enumerate(zip(found, locally(option), strict=True)):
        for name in ("loss", "cross_entropy", "gradient_norm"):
            np.testing.assert_allclose(
                mine[name], theirs[name], rtol=TOLERANCES[option], err_msg=f"step {step}: {name}"
            )
