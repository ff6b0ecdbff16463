"""Trains on one device and over meshes, for tests that compare the two step by step.

Steps compute in their own types, and go on from each other. Tests of a single step or layer, which
need differences to be visible at 1e-9, compute in float64 with `wings.verification` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.input import Batch
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdOptions, SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.trainer import Trainer
from tests.runtime import tiny_translation


def on_one_device(trainer: Trainer, state: NestedMap | None = None) -> SingleDeviceRuntime:
    """Returns a runtime of one device that holds a state; by default the trainer's first one."""
    return _started(SingleDeviceRuntime(trainer), state)


def on_mesh(
    trainer: Trainer,
    mesh: str,
    strategy: str,
    state: NestedMap | None = None,
    options: SpmdOptions | None = None,
) -> SpmdRuntime:
    """Returns a runtime over a mesh that holds a state; by default the trainer's first one."""
    partitioning = Partitioning.make(mesh, strategy)
    devices = devices_for(partitioning.mesh.size)
    return _started(SpmdRuntime(trainer, partitioning, devices, options or SpmdOptions()), state)


def _started(runtime, state):
    if state is None:
        runtime.init_state()
    else:
        runtime.load_state(state)
    return runtime


def train(
    runtime: SingleDeviceRuntime | SpmdRuntime,
    steps: int,
    batch_of: Callable[[int], Batch] = tiny_translation.batch,
) -> list[dict[str, float]]:
    """Returns the metrics of each of the next steps.

    Args:
      runtime: the runtime.
      steps: their number.
      batch_of: returns the batch of an index, which begins at 0.
    """
    return [runtime.train_step(batch_of(index)).read() for index in range(steps)]


def assert_same_metrics(
    found: Iterable[Mapping[str, float]],
    expected: Iterable[Mapping[str, float]],
    tolerance: float | Callable[[str], float],
    names: tuple[str, ...] = (),
) -> None:
    """Asserts that the metrics of all steps are close.

    Args:
      found: metrics of each step over the mesh.
      expected: metrics of each step on one device.
      tolerance: largest relative difference, or a function of the metric's name.
      names: the metrics to compare; by default all, which must be the same.
    """
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert names or mine.keys() == theirs.keys()
        for name in names or theirs:
            np.testing.assert_allclose(
                mine[name],
                theirs[name],
                rtol=tolerance(name) if callable(tolerance) else tolerance,
                atol=1e-6,
                err_msg=f"step {step}: {name}",
            )


def assert_same_arrays(
    found: NestedMap, expected: NestedMap, relative: float = 0.0, absolute: float = 0.0
) -> None:
    """Asserts that two trees have close arrays; the message names the path that differs."""
    for (path, mine), theirs in zip(found.flatten_items(), expected.flatten(), strict=True):
        np.testing.assert_allclose(
            np.asarray(mine), np.asarray(theirs), rtol=relative, atol=absolute, err_msg=path
        )
