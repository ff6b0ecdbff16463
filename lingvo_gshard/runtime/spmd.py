"""The runtime of a mesh: one program over all devices, partitioned by XLA's SPMD partitioner."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.bound_function import BoundFunction, WeightsFunction
from lingvo_gshard.core.lazy import Device, jax, multihost_utils, tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.input import Batch
from lingvo_gshard.runtime import offloading, partitioning_log
from lingvo_gshard.runtime.compilations import Compilation, Inputs, inputs_of
from lingvo_gshard.runtime.devices import peak_memory, platform_of
from lingvo_gshard.runtime.program import padding, step_programs
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.step_compiler import (
    CompiledStep,
    StepCompiler,
    batch_key,
    batch_specs,
    traits_of,
)
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import Replicated, check_replicated, replicated
from lingvo_gshard.training import Measurement, ReadMeasured, StepMetrics, Trainer, WeightedMetrics
from lingvo_gshard.training.step.metric_vectors import pair_with_weights


@dataclasses.dataclass(frozen=True)
class SpmdOptions:
    """Options of runtimes that compile programs for a mesh.

    Attributes:
      partitioner: the partitioner in XLA, "gspmd" or "shardy".
      max_replicated_megabytes: refuses to run if a device would hold more than this many MiB of
        unsplit tensors whose letters the strategy splits. None allows any amount.
      compile_options: changes to the compiler's options (runtime/compile_options.py).
      pads_state: whether the state is padded in storage; see `Partitioning`.
    """

    partitioner: str = "gspmd"
    max_replicated_megabytes: float | None = None
    compile_options: tuple[str, ...] = ()
    pads_state: bool = True


class SpmdRuntime:
    """Runs a trainer's functions on all devices of a mesh.

    The state is a list of jax.Arrays, laid out as the partitioning says. A training step donates
    its memory. In a cluster each process transfers only what its own devices need of a batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        partitioning: Partitioning,
        devices: Sequence[Device],
        options: SpmdOptions | None = None,
    ):
        """Makes a runtime without a state.

        Args:
          devices: as many as the mesh has places, in its order.
          options: the defaults of SpmdOptions if None.

        Raises:
          UserError: the devices do not fill the mesh or lack the products of `step.precision`, or
            too much is replicated.
        """
        options = options or SpmdOptions()
        self._trainer = trainer
        self._devices = list(devices)
        self._partitioner = options.partitioner
        partitioning.mesh.check_devices(len(self._devices))
        first = self._devices[0]
        platform = platform_of(first)
        capability = getattr(first, "compute_capability", "")
        trainer.check_device(platform, first.device_kind, capability)
        partitioning = partitioning.on(platform, first.device_kind)
        if options.pads_state:
            partitioning = partitioning.with_padded_state()
        self._partitioning = partitioning
        self._mesh = jax.sharding.Mesh(
            partitioning.mesh.arrange(self._devices), partitioning.mesh.names
        )
        self._specs = trainer.state_specs()
        self._arrays = step_programs.state_arrays(trainer, partitioning)
        self._held: list[Any] = []
        traits = traits_of(trainer, partitioning)
        self._compiler = StepCompiler(options.compile_options, traits)
        unsplit = _unsplit(trainer, partitioning)
        if options.max_replicated_megabytes is not None:
            check_replicated(unsplit, options.max_replicated_megabytes)
        self._messages = [
            *trainer.device_notes(partitioning.platform),
            *offloading.notes(trainer, partitioning.platform),
            *partitioning_log.unused_axis_warnings(partitioning),
            *partitioning_log.describe_unsplit(unsplit),
        ]

    @property
    def device_summary(self) -> str:
        """The devices in words, such as `8 CPU devices as data=8`."""
        kind = self._devices[0].device_kind
        kind = kind.upper() if kind == "cpu" else kind
        return f"{len(self._devices)} {kind} devices as {self._partitioning.mesh}"

    @property
    def step(self) -> int:
        """Number of steps taken."""
        held = dict(zip((array.path for array in self._arrays), self._held, strict=True))
        return int(held["step"].addressable_data(0))

    @property
    def compilations(self) -> list[Compilation]:
        """The programs compiled so far, in order."""
        return self._compiler.compilations

    def peak_device_memory(self) -> int | None:
        """Returns the most bytes that were ever in use on a device of this process."""
        return peak_memory(self._devices)

    def pop_messages(self) -> list[str]:
        """Returns new messages about memory, collectives and tensors that are not split."""
        messages, self._messages = self._messages, []
        return [*messages, *self._compiler.pop_messages()]

    def init_state(self) -> None:
        """Draws the initial weights, each part on the device that holds it."""
        step = self._step("init", (), lambda *made_of: (step_programs.init_program(*made_of), []))
        self._held = list(step.executable())

    def load_state(self, state: NestedMap) -> None:
        """Replaces the state.

        Args:
          state: a tree of NumPy arrays or jax.Arrays. The next step donates the memory of
            jax.Arrays that have the right layout already.
        """
        self._held = [
            padding.put(array, value, spec.shape, self._mesh, is_donated=True)
            for array, value, spec in zip(
                self._arrays, state.flatten(), self._specs.flatten(), strict=True
            )
        ]

    def load_theta(self, theta: NestedMap) -> None:
        """Replaces the evaluated weights; there is no other state afterwards."""
        arrays = step_programs.evaluated_arrays(self._arrays, self._trainer)
        values = dict(zip((a.path for a in arrays), theta.flatten(), strict=True))
        self._held = [
            padding.put(a, values[a.path], spec.shape, self._mesh, is_donated=True)
            if a.path in values
            else None
            for a, spec in zip(self._arrays, self._specs.flatten(), strict=True)
        ]

    def state(self) -> NestedMap:
        """Returns the state as jax.Arrays. The next step makes it invalid."""
        rows = zip(self._arrays, self._held, self._specs.flatten(), strict=True)
        return self._specs.pack(
            None if value is None else padding.show(array, value, spec.shape, self._mesh)
            for array, value, spec in rows
        )

    def abstract_state(self) -> NestedMap:
        """Returns shape, dtype and sharding of the state's arrays, as jax.ShapeDtypeStructs."""
        pairs = zip(self._arrays, self._specs.flatten(), strict=True)
        return self._specs.pack(padding.shown(a, spec.shape, self._mesh) for a, spec in pairs)

    def theta_on_host(self) -> NestedMap:
        """Returns the unsharded weights as NumPy arrays, in every process."""
        theta = self.state().theta
        if jax.process_count() == 1:
            return theta.transform(np.asarray)
        return theta.transform(lambda x: multihost_utils.process_allgather(x, tiled=True))

    def own_rows(self, specs: Mapping[str, tf.TensorSpec]) -> np.ndarray:
        """Returns which rows of a batch the devices of this process need, bool [B]."""
        arrays = step_programs.batch_arrays(dict(specs), self._partitioning)
        found = np.zeros(arrays[0].shape[0], bool)
        for array in arrays:
            sharding = array.sharding(self._mesh)
            if sharding is None:
                return np.ones_like(found)
            for index in sharding.addressable_devices_indices_map(array.shape).values():
                assert index is not None
                found[index[0]] = True
        return found

    def train_step(self, batch: Batch) -> StepMetrics:
        """Takes one training step without waiting for its result."""
        step = self._step_on_batch("train", batch, step_programs.train_program)
        *state, metrics = step.executable(*self._held, *step.feed(batch, self._mesh))
        self._held = state
        return step.metrics(metrics)

    def eval_step(self, batch: Batch) -> WeightedMetrics:
        """Returns the metrics of one batch, name -> (value, weight), without training."""
        step = self._step_on_batch("eval", batch, step_programs.eval_program)
        (metrics,) = step.executable(*self._evaluated(), *step.feed(batch, self._mesh))
        return pair_with_weights(step.metrics(metrics).read())

    def measure(self, name: str, function: Measurement, batch: Batch) -> ReadMeasured:
        """Starts a function of the weights, and returns a function that waits for its results."""
        made_of = (self._trainer, self._partitioning, self._partitioner, batch_specs(batch))
        step = self._compiler.step(
            name,
            (batch_key(batch), function),
            self._devices,
            lambda: (step_programs.measuring_program(*made_of, function), []),
            inputs_of(batch),
            is_reported=False,
        )
        pairs = zip(self._arrays, self._held, strict=True)
        theta = [value for array, value in pairs if array.path.startswith("theta.")]
        return step.start(*theta, *step.feed(batch, self._mesh))

    def bind_weights(self, function: WeightsFunction) -> BoundFunction:
        """Returns `function` with the current weights as its first argument."""
        return functools.partial(self._run_function, function)

    def executable(self, kind: str = "train") -> Executable:
        """Returns the program compiled last for an "init", "train" or "eval" step."""
        return self._compiler.last(kind)

    def _run_function(self, function: WeightsFunction, ids: np.ndarray) -> np.ndarray:
        spec = tf.TensorSpec(ids.shape, ids.dtype)
        step = self._step(
            "function",
            (function, ids.shape),
            lambda trainer, partitioning, partitioner: (
                step_programs.function_program(trainer, partitioning, partitioner, function, spec),
                [],
            ),
            inputs_of({"ids": ids}),
        )
        (result,) = step.executable(*self._evaluated(), *step.feed({"ids": ids}, self._mesh))
        return np.asarray(result.addressable_data(0))

    def _evaluated(self) -> list[jax.Array]:
        """Returns the arrays of the state that evaluation and decoding use."""
        values = dict(zip((a.path for a in self._arrays), self._held, strict=True))
        return [values[a.path] for a in step_programs.evaluated_arrays(self._arrays, self._trainer)]

    def _step_on_batch(self, kind: str, batch: Batch, make: Callable) -> CompiledStep:
        specs = batch_specs(batch)
        return self._step(
            kind, batch_key(batch), lambda *made_of: make(*made_of, specs), inputs_of(batch)
        )

    def _step(
        self, kind: str, key: tuple, make: Callable, inputs: Inputs | None = None
    ) -> CompiledStep:
        made_of = (self._trainer, self._partitioning, self._partitioner)
        return self._compiler.step(kind, key, self._devices, lambda: make(*made_of), inputs)


def _unsplit(trainer: Trainer, partitioning: Partitioning) -> list[Replicated]:
    """Returns the unsplit tensors of a state that have letters the strategy splits."""
    specs = trainer.state_specs()
    return [
        row
        for part, kind in trainer.sharded_parts.items()
        if part in specs
        for row in replicated(specs[part].flatten(), partitioning, kind)
    ]
