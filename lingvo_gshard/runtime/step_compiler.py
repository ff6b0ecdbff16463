"""Compiles each program of a runtime once, and collects reports on the programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from lingvo_gshard.core.lazy import Device, jax, tf
from lingvo_gshard.data.input import Batch
from lingvo_gshard.runtime import partitioning_log
from lingvo_gshard.runtime.compilations import Compilation, Inputs, compiling
from lingvo_gshard.runtime.compile_options import Traits, chosen_for
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training import StepMetrics, Trainer
from lingvo_gshard.training.step.precision import may_be_ahead


def traits_of(trainer: Trainer, partitioning: Partitioning) -> Traits:
    """Returns what the compiler options of a training step depend on."""
    is_ahead = trainer.gradients.gathers_ahead and any(
        may_be_ahead(spec) and partitioning.is_gathered(spec)
        for spec in trainer.theta_specs.flatten()
    )
    return Traits(trainer.p.precision, _is_in_parts(trainer, partitioning), is_ahead)


def _is_in_parts(trainer: Trainer, partitioning: Partitioning) -> bool:
    """Returns whether a step has several micro-batches, and gathers no weights in them.

    Most weights, of all but experts, are then whole along the axes that split rows. XLA's pipeliner
    takes a gather of activations out of the loop over micro-batches, with the forward pass before
    it, and computes that twice.
    """
    if trainer.gradients.accumulate is None:
        return False
    rows = {*partitioning.split("B")[0]}
    sizes = {True: 0, False: 0}
    for spec in trainer.theta_specs.flatten():
        if "E" not in spec.layout:
            split = {axis for axes in partitioning.spec_split(spec) for axis in axes}
            sizes[bool(split & rows)] += math.prod(spec.shape)
    return sizes[False] > sizes[True]


# Makes a program, and names the metrics that its last output holds.
MakeProgram = Callable[[], tuple[Program, list[str]]]


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled program and the names of the metrics it returns."""

    executable: Executable
    metric_names: list[str]

    def feed(self, batch: Batch, mesh: jax.sharding.Mesh) -> list[jax.Array]:
        """Returns the batch as the program's last inputs, laid out over a mesh of devices."""
        inputs = self.executable.program.inputs[-len(batch) :]
        return [array.put(batch[array.path.removeprefix("batch.")], mesh) for array in inputs]

    def start(self, *inputs: jax.Array) -> Callable[[], dict[str, np.ndarray]]:
        """Runs the program. Returns a function that waits for its outputs, by name.

        The outputs must be whole on each device. They are copied to the host once computed.
        """
        names = [output.path for output in self.executable.program.outputs]
        outputs = dict(zip(names, self.executable(*inputs), strict=True))
        for array in outputs.values():
            array.copy_to_host_async()
        return lambda: {n: np.asarray(x.addressable_data(0)) for n, x in outputs.items()}

    def metrics(self, values: jax.Array) -> StepMetrics:
        """Returns the metrics, whose values are copied to the host as soon as they are computed."""
        values.copy_to_host_async()
        return StepMetrics(self.metric_names, lambda: np.asarray(values.addressable_data(0)))


class StepCompiler:
    """A cache of compiled programs.

    Attributes:
      compilations: the programs compiled so far, in order.
    """

    def __init__(self, compile_options: Sequence[str] = (), traits: Traits | None = None):
        """Makes an empty cache.

        Args:
          compile_options: changes to the options of `runtime/compile_options.py`, which the
            programs are compiled with.
          traits: what `traits_of` says of the training steps; some of these options depend on it.
        """
        self._traits = traits or Traits()
        self._compile_options = tuple(compile_options)
        self.compilations: list[Compilation] = []
        self._steps: dict[tuple, CompiledStep] = {}
        self._messages: list[str] = []

    def step(
        self,
        kind: str,
        key: Hashable,
        devices: Sequence[Device],
        make: MakeProgram,
        inputs: Inputs | None = None,
        is_reported: bool = True,
    ) -> CompiledStep:
        """Returns the compiled program of a kind and a key. Compiles it on first use.

        Args:
          kind: such as "train"; names the program to `last`.
          key: tells apart the programs of one kind, such as by the shapes of their inputs.
          inputs: what `compilations` says of the program's inputs; none by default.
          is_reported: whether `pop_messages` describes the program.
        """
        if (kind, key) not in self._steps:
            with compiling():
                program, metric_names = make()
                is_training = kind == "train"
                traits = self._traits if is_training else Traits(self._traits.precision)
                options = chosen_for(devices[0], self._compile_options, traits, program)
                executable = Executable(program, devices, options)
            self.compilations.append(_compilation(kind, inputs or {}, executable))
            self._steps[kind, key] = CompiledStep(executable, metric_names)
            if is_reported:
                self._messages += partitioning_log.describe_program(executable)
        return self._steps[kind, key]

    def last(self, kind: str) -> Executable:
        """Returns the program of a kind that was compiled last; ValueError if there is none."""
        for found, key in reversed(self._steps):
            if found == kind:
                return self._steps[found, key].executable
        raise ValueError(f"No {kind} program has been compiled yet")

    def pop_messages(self) -> list[str]:
        """Returns reports on the programs compiled since the last call."""
        messages, self._messages = self._messages, []
        return messages


def _compilation(kind: str, inputs: Inputs, executable: Executable) -> Compilation:
    program = executable.program
    return Compilation(
        kind,
        inputs,
        tracing=program.tracing_seconds,
        lowering=program.lowering_seconds + executable.lowering_seconds,
        compiling=executable.compiling_seconds,
        is_cached=executable.is_cached,
        memory=executable.memory(),
    )


def batch_specs(batch: Batch) -> dict[str, tf.TensorSpec]:
    """Returns the shape and dtype of each feature, by name in alphabetical order."""
    return {name: tf.TensorSpec(x.shape, x.dtype) for name, x in sorted(batch.items())}


def batch_key(batch: Batch) -> tuple:
    """Returns a key that is equal for batches of equal shapes and types."""
    return tuple((name, x.shape, x.dtype.name) for name, x in sorted(batch.items()))
