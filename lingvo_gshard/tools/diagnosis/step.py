"""Trains a small model with experts on all devices and on one, and compares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.lazy import Device
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdOptions, SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tools.benchmarks.step import StepCase, stack_cases
from lingvo_gshard.tools.diagnosis.check import Check, State
from lingvo_gshard.training.step.trainer import Trainer

_STEPS = 3
_LENGTH, _ROWS_PER_DEVICE = 16, 2
# float32 sums in another order differ by less; bfloat16 products of a TPU by more.
_LEAST_EQUAL = {"cpu": 1e-4}
_LEAST_EQUAL_OF_ACCELERATORS = 2e-2
_STRATEGY = "expert"


def check_step(devices: Sequence[Device]) -> Check:
    """Compares the weights after a few steps split over the devices with those of one device.

    Experts and rows are split over all devices, so that a step has collectives of several kinds.
    """
    mesh = f"data={len(devices)}"
    case = _case(len(devices))
    options = SpmdOptions(partitioner="gspmd")
    split = SpmdRuntime(case.trainer, Partitioning.make(mesh, _STRATEGY), devices, options)
    whole = SingleDeviceRuntime(case.trainer)
    whole.init_state()
    split.load_state(whole.state())
    for _ in range(_STEPS):
        for runtime in (whole, split):
            runtime.train_step(case.batch).read()
    worst, path = _largest_difference(whole, split)
    found = f"{_STEPS} steps on {mesh}, strategy {_STRATEGY}"
    most = _LEAST_EQUAL.get(devices[0].platform, _LEAST_EQUAL_OF_ACCELERATORS)
    if not worst <= most:
        found += f": {path} differs by {worst:.1e} of its largest value"
        advice = "gshard-verify finds the layer; do not train on these devices before it is found"
        return Check("sharded step", State.FAILURE, found, advice)
    return Check("sharded step", State.OK, f"{found}: equal to one device within {worst:.0e}")


def _case(devices: int) -> StepCase:
    """Returns a small encoder with experts, and a batch that divides by the devices."""
    moe = MixtureOfExperts.params()
    moe.num_experts = max(devices, 2)
    # One group of tokens for each device.
    moe.group_size = _ROWS_PER_DEVICE * _LENGTH
    stack = TransformerStack.params().set(
        model_dim=32, hidden_dim=64, num_heads=4, num_layers=2, moe_every=2, moe=moe
    )
    cases = stack_cases(stack, Trainer.params(), _ROWS_PER_DEVICE * devices, _LENGTH)
    return cases[0]


def _largest_difference(whole: SingleDeviceRuntime, split: SpmdRuntime) -> tuple[float, str]:
    """Returns the largest difference of a weight, as a share of its largest value, and its path."""
    expected = dict(whole.theta_on_host().flatten_items())
    worst, worst_path = 0.0, ""
    for path, found in split.theta_on_host().flatten_items():
        scale = max(float(np.abs(expected[path]).max()), 1e-3)
        difference = float(np.abs(found - expected[path]).max()) / scale
        if math.isnan(difference) or difference > worst:
            worst, worst_path = difference, path
    return worst, worst_path
