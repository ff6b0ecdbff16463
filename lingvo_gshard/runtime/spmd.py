"""The spmd runtime: one program over all devices of a mesh, cut by XLA's SPMD partitioner."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import multihost_utils

from lingvo_gshard.core.bound_function import WeightsFunction
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime import reports
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.runtime.program.step_programs import (
    PARTS,
    eval_program,
    evaluated_arrays,
    function_program,
    init_program,
    state_arrays,
    train_program,
)
from lingvo_gshard.runtime.step_metrics import StepMetrics
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.replication import check_replicated, replicated
from lingvo_gshard.training.monitoring.metric_vector import pair_with_weights
from lingvo_gshard.training.runtime_protocol import NumpyBatch, WeightedMetrics
from lingvo_gshard.training.trainer import Trainer


def step_metrics(names: list[str], values: jax.Array) -> StepMetrics:
    """Returns the metrics of a step, whose values are copied to the host when they are ready."""
    values.copy_to_host_async()
    return StepMetrics(names, lambda: np.asarray(values.addressable_data(0)))


class SpmdFunction:
    """A function of an array, compiled once per shape for all devices of the mesh."""

    def __init__(self, run: Callable, function: WeightsFunction):
        self._run, self._function = run, function
        self._shapes: set[tuple[int, ...]] = set()

    @property
    def compile_count(self) -> int:
        """The number of shapes compiled so far."""
        return len(self._shapes)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        self._shapes.add(array.shape)
        return self._run(self._function, array)


@dataclasses.dataclass(frozen=True)
class _Step:
    executable: Executable
    metrics: list[str]
    seconds: float


class SpmdRuntime:
    """Runs a trainer's functions on all devices of a mesh.

    The state lives in jax.Arrays, each where the partitioning says; a step takes their memory over.
    Every process of a cluster makes the same calls with the same global batches, of which each puts
    onto its devices what they need.
    """

    def __init__(
        self,
        trainer: Trainer,
        partitioning: Partitioning,
        devices: Sequence[jax.Device],
        partitioner: str = "gspmd",
        max_replicated_megabytes: float | None = None,
    ):
        """Raises ValueError if the devices do not fill the mesh, or if they would hold more than
        `max_replicated_megabytes` whole although the strategy splits them.
        """
        self._trainer = trainer
        self._partitioning = partitioning
        self._devices = list(devices)
        self._partitioner = partitioner
        partitioning.mesh.check_devices(len(self._devices))
        self._mesh = jax.sharding.Mesh(
            partitioning.mesh.arrange(self._devices), partitioning.mesh.names
        )
        self._specs = trainer.state_specs()
        self._arrays = state_arrays(trainer, partitioning)
        self._state: list[jax.Array] | None = None
        self._executables: dict[tuple, _Step] = {}
        self._notes = self._check_replicated(max_replicated_megabytes)

    @property
    def device_summary(self) -> str:
        """The devices in words, such as `8 CPU devices as data=8`."""
        kind = self._devices[0].device_kind
        kind = kind.upper() if kind == "cpu" else kind
        return f"{len(self._devices)} {kind} devices as {self._partitioning.mesh}"

    @property
    def compile_seconds(self) -> float:
        """Seconds spent so far tracing, lowering and compiling."""
        return sum(step.seconds for step in self._executables.values())

    @property
    def compile_count(self) -> int:
        """The number of programs compiled so far."""
        return len(self._executables)

    def pop_messages(self) -> list[str]:
        """Returns what there is to say since the last call: of memory, and of what is not split."""
        notes, self._notes = self._notes, []
        return notes

    def init_state(self) -> None:
        """Draws the initial weights, each part on the device that holds it."""
        step = self._find(("init",), lambda: (init_program(*self._made_of()), []))
        self._state = list(step.executable())

    def load_state(self, state: NestedMap) -> None:
        """Takes over a state of NumPy arrays or of jax.Arrays.

        Of jax.Arrays that lie as they shall already the next step takes the memory.
        """
        self._state = [
            array.put(value, self._mesh, taken_over=True)
            for array, value in zip(self._arrays, state.flatten(), strict=True)
        ]

    def load_theta(self, theta: NestedMap) -> None:
        """Takes over, alone, the part of a state that is evaluated and decoded with."""
        arrays = evaluated_arrays(self._arrays, self._trainer)
        values = dict(zip((a.path for a in arrays), theta.flatten(), strict=True))
        self._state = [
            a.put(values[a.path], self._mesh, taken_over=True) if a.path in values else None
            for a in self._arrays
        ]

    def state(self) -> NestedMap:
        """Returns the state as it lies on the devices; the next step makes it invalid."""
        return self._specs.pack(self._state)

    def theta_on_host(self) -> NestedMap:
        """Returns the whole weights as NumPy arrays, in every process."""
        theta = self.state().theta
        if jax.process_count() == 1:
            return theta.transform(np.asarray)
        return theta.transform(lambda x: multihost_utils.process_allgather(x, tiled=True))

    def abstract_state(self) -> NestedMap:
        """Returns shape, type and layout of the state's arrays, as jax.ShapeDtypeStructs."""
        return self._specs.pack(
            jax.ShapeDtypeStruct(a.shape, a.struct.dtype, sharding=a.sharding(self._mesh))
            for a in self._arrays
        )

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return int(self.state().step.addressable_data(0))

    def train_step(self, batch: NumpyBatch) -> StepMetrics:
        """Takes one step; does not wait for it."""
        step = self._step("train", batch, train_program)
        *state, metrics = step.executable(*self._state, *self._feed(step, batch))
        self._state = state
        return step_metrics(step.metrics, metrics)

    def eval_step(self, batch: NumpyBatch) -> WeightedMetrics:
        """Returns name -> (value, weight) of one batch without training."""
        step = self._step("eval", batch, eval_program)
        (metrics,) = step.executable(*self._theta(), *self._feed(step, batch))
        return pair_with_weights(step_metrics(step.metrics, metrics).read())

    def bind_weights(self, function: WeightsFunction) -> SpmdFunction:
        """Returns a function (theta, ids) -> tensor as one of ids alone, on the weights held."""
        return SpmdFunction(self._run_function, function)

    def _run_function(self, function: WeightsFunction, ids: np.ndarray) -> np.ndarray:
        spec = tf.TensorSpec(ids.shape, ids.dtype)
        step = self._find(
            ("function", function, ids.shape),
            lambda: (function_program(*self._made_of(), function, spec), []),
        )
        (result,) = step.executable(*self._theta(), *self._feed(step, {"ids": ids}))
        return np.asarray(result.addressable_data(0))

    def executable(self, kind: str = "train") -> Executable:
        """Returns the compiled program of the last "init", "train" or "eval" step."""
        found = [s.executable for key, s in self._executables.items() if key[0] == kind]
        if not found:
            raise ValueError(f"no {kind} step has been compiled yet")
        return found[-1]

    def _theta(self) -> list[jax.Array]:
        values = dict(zip((a.path for a in self._arrays), self._state, strict=True))
        return [values[a.path] for a in evaluated_arrays(self._arrays, self._trainer)]

    def _step(self, kind: str, batch: NumpyBatch, make: Callable) -> _Step:
        key = (kind, *((name, batch[name].shape) for name in sorted(batch)))
        specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in sorted(batch.items())}
        return self._find(key, lambda: make(*self._made_of(), specs))

    def _find(self, key: tuple, make: Callable[[], tuple[Program, list[str]]]) -> _Step:
        """The compiled step of that key, made on first use."""
        if key not in self._executables:
            started = time.monotonic()
            program, metrics = make()
            executable = Executable(program, self._devices)
            seconds = time.monotonic() - started
            self._executables[key] = _Step(executable, metrics, seconds)
            self._notes += reports.compiled(executable)
        return self._executables[key]

    def _made_of(self) -> tuple[Trainer, Partitioning, str]:
        return self._trainer, self._partitioning, self._partitioner

    def _check_replicated(self, most: float | None) -> list[str]:
        """What is whole although the strategy splits it; ValueError if that is too much."""
        found = [
            row
            for part, kind in PARTS.items()
            if part in self._specs
            for row in replicated(self._specs[part].flatten(), self._partitioning, kind)
        ]
        if most is not None:
            check_replicated(found, most)
        return [*reports.unused_axes(self._partitioning), *reports.not_split(found)]

    def _feed(self, step: _Step, batch: NumpyBatch) -> list[jax.Array]:
        inputs = step.executable.program.inputs[-len(batch) :]
        return [a.put(batch[a.path.removeprefix("batch.")], self._mesh) for a in inputs]
