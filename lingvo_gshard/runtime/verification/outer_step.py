"""Verifies the outer step of local updates: over all workers, compared with one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.local_updates.outer_step import outer_step_program
from lingvo_gshard.runtime.local_updates.workers import Workers
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.runtime.verification.comparison import Difference, compare_update
from lingvo_gshard.runtime.verification.float64 import in_float64
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.training.trainer import Trainer

# Workers' weights and outer moments differ by noise of this scale.
_NOISE = 0.05


class OuterStep:
    """The outer step over all workers, after it ran.

    Args:
      trainer: defines the outer step.
      workers: the workers of the mesh.
      partitioner: "gspmd" or "shardy".
      state: the state that the workers' states are made of, by noise on the weights.

    Attributes:
      executable: the compiled outer step.
    """

    def __init__(self, trainer: Trainer, workers: Workers, partitioner: str, state: NestedMap):
        self._mesh = workers.together
        one = Mesh(tuple((name, 1) for name in self._mesh.names))
        alone = dataclasses.replace(workers.everywhere, mesh=one)
        program, whole = (
            in_float64(outer_step_program(trainer, workers.count, each, partitioner))
            for each in (workers.everywhere, alone)
        )
        self._before = _inputs(program, trainer, workers.count, state)
        self.executable = Executable(program, workers.all_devices)
        self._partitioned = _run(self.executable, self._before, workers.all_devices)
        devices = workers.all_devices[:1]
        self._whole = _run(Executable(whole, devices), self._before, devices)

    def differences(self) -> Iterator[tuple[str, Difference]]:
        """Yields the name and the difference of each array that the outer step changes."""
        weights = len([a for a in self.executable.program.outputs if a.path.startswith("theta.")])
        rows = zip(
            self.executable.program.outputs,
            self._partitioned,
            self._whole,
            self._before,
            strict=False,
        )
        for index, (array, partitioned, whole, before) in enumerate(rows):
            of_workers = index < weights // 2
            name = f"workers.{array.path}" if of_workers else array.path
            yield name, compare_update(partitioned, whole, before, self._mesh)


def _inputs(program: Program, trainer: Trainer, count: int, state: NestedMap) -> list[np.ndarray]:
    """Returns workers' weights that differ, the last outer weights, moments, stopped, the step."""
    rng = np.random.default_rng(trainer.p.seed)
    theta = [np.asarray(x, np.float64) for x in state.theta.flatten()]

    def noisy(shape: tuple[int, ...]) -> np.ndarray:
        return _NOISE * rng.normal(size=shape)

    values = [x + noisy((count, *x.shape)) for x in theta] + theta
    moments = program.inputs[len(values) : -2]
    values += [noisy(array.shape) for array in moments]
    values += [np.zeros(count, bool), np.asarray(state.step)]
    return [x.astype(a.dtype) for x, a in zip(values, program.inputs, strict=True)]


def _run(
    executable: Executable, values: list[np.ndarray], devices: list[jax.Device]
) -> tuple[jax.Array, ...]:
    mesh = executable.program.mesh
    arranged = jax.sharding.Mesh(mesh.arrange(devices), mesh.names)
    pairs = zip(executable.program.inputs, values, strict=True)
    return executable(*(array.put(value, arranged) for array, value in pairs))
