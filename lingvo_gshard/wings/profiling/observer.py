"""The observer that profiles some steps of a training run.

Compiled programs name operations, but not lines: TensorFlow passes on only its own innermost frame.
The observer therefore traces the step once more, without compiling it. The traced operations know
their lines.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pathlib
import re
import timeit
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from lingvo_gshard.core import processes, scope_name, tf
from lingvo_gshard.data import Batch
from lingvo_gshard.runtime import SingleDeviceRuntime, batch_specs
from lingvo_gshard.sharding import Mesh, Partitioning, use_partitioning
from lingvo_gshard.tasks import BatchSpecs
from lingvo_gshard.training import (
    MetricsRow,
    ObservedRun,
    ObserverFactory,
    Runtime,
    StepObserver,
    Trainer,
)
from lingvo_gshard.wings.facts.step import step_flops
from lingvo_gshard.wings.hlo import names as hlo_names
from lingvo_gshard.wings.planning.calibration import Calibration
from lingvo_gshard.wings.planning.machines import chips
from lingvo_gshard.wings.planning.operation_rows import OPTIMIZER, kinds_of_layers
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.planned_program import layer_scopes
from lingvo_gshard.wings.profiling import timeline as steps_lib
from lingvo_gshard.wings.profiling import xspace
from lingvo_gshard.wings.profiling.comparison import Comparison, calibrate, check_plan, compare
from lingvo_gshard.wings.profiling.files import (
    CALIBRATION,
    COMPARISON,
    SUMMARY,
    ProfileFiles,
    encode,
)
from lingvo_gshard.wings.profiling.profile import Profile, Rate
from lingvo_gshard.wings.profiling.summary import StepFacts, Summary
from lingvo_gshard.wings.profiling.timeline import StepRange
from lingvo_gshard.wings.profiling.trace import JaxTracer, Recorder, TensorFlowTracer, Tracer
from lingvo_gshard.wings.services.runtime import DeviceRuntime
from lingvo_gshard.wings.tracing.source_lines import line_of_operation, shown

_SIZE = 2048
_REPEATS = 5
_CPU = "cpu"


def attainable(tracer: Tracer, devices: int) -> Rate | None:
    """Returns the rate that large products reach on all devices of this process together.

    It is the published rate in bfloat16 if the chip is known. Otherwise a large float32 product is
    timed on one device. CPU devices share the machine's cores: one product uses them all. Returns
    None if the chip is unknown and no product can be timed.
    """
    key = tracer.chip_key()
    if key and key != _CPU:
        chip = chips.get(key)
        source = f"{devices} x the published bfloat16 rate of {chip.name}"
        return Rate(flops_per_second=chip.peak("bfloat16") * devices, source=source)
    multiply = tracer.product(_SIZE)
    if multiply is None:
        return None
    multiply()
    seconds = min(timeit.repeat(multiply, number=1, repeat=_REPEATS))
    count = 1 if key == _CPU else devices
    source = f"the best of {_REPEATS} float32 products of {_SIZE} x {_SIZE} matrices, timed here"
    return Rate(flops_per_second=count * 2 * _SIZE**3 / seconds, source=source)


_NUMBER = re.compile(r"_\d+$")
# Name scopes that the backward pass adds to the name scopes of forward operations.
_BACKWARD = re.compile(r"(?:gradient_tape|gradients(?:_\d+)?|rematerialized(?:_\d+)?)/")


class SourceLines:
    """Finds lines by the names of operations."""

    def __init__(self, trainer: Trainer, batch: BatchSpecs, partitioning: Partitioning | None):
        self._trainer, self._batch, self._partitioning = trainer, batch, partitioning
        self._layers = {scope_name(layer.path): layer for layer in trainer.task.all_layers()}

    def of(self, op_name: str) -> str:
        """Returns the file and line that made an operation, such as "attention/dense.py:40".

        An operation of the backward pass gets the line of its forward operation. If no line is
        known, the operation gets the line of the layer's class. An operation without a layer gets
        "".
        """
        forward = _BACKWARD.sub("", op_name)
        scope = forward
        while "/" in scope:
            # If one operation has two gradients, the name of the second ends with a number.
            for name in (scope, _NUMBER.sub("", scope)):
                if name in self._lines:
                    return self._lines[name]
            scope = scope.rpartition("/")[0]
            if scope in self._layers:
                break
        layer, phase = hlo_names.layer_and_phase(op_name, frozenset(self._layers))
        if phase == OPTIMIZER:
            return _line_of_class(type(self._trainer.optimizer))
        return _line_of_class(type(self._layers[layer])) if layer else ""

    @functools.cached_property
    def _lines(self) -> Mapping[str, str]:
        """The line of each operation, and of each name scope the line of its first operation."""
        lines: dict[str, str] = {}
        for operation in _operations(self._traced()):
            line = line_of_operation(operation)
            name = _BACKWARD.sub("", operation.name)
            while line and name and name not in self._layers:
                lines.setdefault(name, line)
                name = name.rpartition("/")[0]
        return lines

    def _traced(self) -> tf.Graph:
        specs = self._trainer.state_specs()
        flat = [tf.TensorSpec(spec.shape, spec.dtype) for spec in specs.flatten()]

        def step(state: list[tf.Tensor], batch: dict[str, tf.Tensor]) -> list[tf.Tensor]:
            new_state, metrics = self._trainer.train_step(specs.pack(state), batch)
            return [*new_state.flatten(), *metrics.flatten()]

        traced = tf.function(step, jit_compile=True, autograph=False)
        with use_partitioning(self._partitioning):
            return traced.get_concrete_function(flat, self._batch).graph


def _operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields the operations of a graph, and of the functions that it calls in loops."""
    pending, seen = [graph], set()
    while pending:
        current = pending.pop()
        for operation in current.get_operations():
            yield operation
            for attribute in operation.node_def.attr.values():
                name = attribute.func.name
                if name and name not in seen:
                    seen.add(name)
                    called = getattr(current._get_function(name), "graph", None)
                    pending += [called] if called is not None else []


def _line_of_class(cls: type) -> str:
    """Returns the line of a class's own `fprop`, or of the class if it defines none."""
    subject = vars(cls).get("fprop", cls)
    subject = inspect.unwrap(subject) if callable(subject) else cls
    try:
        filename = inspect.getsourcefile(subject) or ""
        return shown(filename, inspect.getsourcelines(subject)[1])
    except (OSError, TypeError):
        return ""


@dataclasses.dataclass(frozen=True)
class ProfileResult:
    """A finished profile, compared with a plan. One that is calibrated gives no calibration."""

    profile: Profile
    files: ProfileFiles
    comparison: Comparison | None = None
    calibration: Calibration | None = None


OnProfile = Callable[[ProfileResult], None]


@dataclasses.dataclass(frozen=True)
class ProfiledStep:
    """The training step to profile."""

    name: str
    trainer: Trainer
    runtime: DeviceRuntime
    partitioning: Partitioning | None

    @classmethod
    def of_run(cls, run: ObservedRun) -> ProfiledStep:
        """Returns the training step of a run."""
        runtime = cast(DeviceRuntime, run.runtime)
        return cls(run.params.name, run.trainer, runtime, run.partitioning)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the step; of one device, an axis of size 1."""
        return self.partitioning.mesh if self.partitioning else Mesh((("data", 1),))


def profile_steps(
    steps: StepRange, on_profile: OnProfile, plan: Plan | None = None, plan_path: str = ""
) -> ObserverFactory:
    """Returns a function that makes the profiler of a run, as `train` takes it.

    Args:
      on_profile: is called in the main process, when the steps have been profiled.
      plan_path: the plan's file, which errors name.
    """

    def make(run: ObservedRun) -> StepObserver:
        steps_lib.check_not_taken(steps, run.first_step)
        if plan is not None:
            mesh = ProfiledStep.of_run(run).mesh
            chip = tracer_of(run.runtime).chip_key()
            check_plan(plan, plan_path, str(mesh), mesh.size, chip)
        return ProfileObserver(run, steps, on_profile, plan)

    return make


class ProfileObserver(StepObserver):
    """Profiles some steps of a run. Does nothing before and after them.

    A profile that fails, because the disk is full or the trace cannot be read, is reported and does
    not end the run.
    """

    def __init__(
        self, run: ObservedRun, steps: StepRange, on_profile: OnProfile, plan: Plan | None = None
    ):
        self._run, self._steps, self._on_profile, self._plan = run, steps, on_profile, plan
        self._recorder: Recorder | None = None
        self._trace: bytes | None = None
        self._batch: Batch = {}
        self._last_begun = self._last_ended = 0

    def needs_idle(self, step: int) -> bool:
        """Returns whether the profiled steps begin here, or have ended."""
        return step in (self._steps.first, self._steps.last + 1)

    def while_idle(self, step: int) -> None:
        """Adds up the trace before the step after the profiled ones."""
        if self._recorder and step > self._steps.last:
            self._attempt(self._finish)

    def before_input(self, step: int) -> None:
        """Starts to record with the first of the steps."""
        if self._recorder and self._last_begun != step - 1:
            # The run was rolled back. The steps are profiled when they come again.
            self._attempt(self._abandon)
        if self._steps.first <= step <= self._steps.last and (
            self._recorder or step == self._steps.first
        ):
            self._attempt(lambda: self._begin(step))

    def before_step(self, step: int, batch: Batch) -> None:
        """Notes that the input is there."""
        if self._recorder:
            self._recorder.start_step()
            self._batch = batch

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Stops recording after the last of the steps."""
        self._last_ended = step
        if self._recorder and step == self._steps.last:
            self._attempt(self._stop)

    def at_end(self) -> None:
        """Ends the profile if the run ends with its steps, or within them."""
        if self._recorder:
            self._attempt(self._finish)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Does a part of the profile's work. A long run must not end because of its profile."""
        try:
            work()
        except Exception as error:
            self._recorder = self._trace = None
            self._run.say(f"Warning: `profile_steps`: no profile: {type(error).__name__}: {error}")

    def _begin(self, step: int) -> None:
        if self._recorder is None:
            self._run.say(f"Profiling {self._steps.in_words}")
            self._recorder = Recorder(tracer_of(self._run.runtime))
        self._recorder.begin(step)
        self._last_begun = step

    def _stop(self) -> None:
        if self._recorder:
            self._trace = self._recorder.end()

    def _abandon(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder and self._trace is None:
            recorder.end()
        self._trace = None

    def _finish(self) -> None:
        recorder = self._recorder
        if recorder is None or recorder.recorded is None or self._last_begun != self._last_ended:
            # An error ended the run within a step.
            self._abandon()
            return
        run, files = self._run, ProfileFiles(pathlib.Path(self._run.logdir.path), self._steps)
        run.say("Reading the trace, and finding the lines of operations")
        trace = self._trace or recorder.end()
        step, batch = ProfiledStep.of_run(run), self._batch
        self._recorder, self._trace, self._batch = None, None, {}
        result = write_profile(step, recorder, trace, batch, files, self._plan)
        if processes.is_main():
            self._on_profile(result)


def write_profile(
    step: ProfiledStep,
    recorder: Recorder,
    serialized: bytes,
    batch: Batch,
    files: ProfileFiles,
    plan: Plan | None = None,
) -> ProfileResult:
    """Adds up a recorded trace and writes all files of the profile.

    Raises:
      UserError: the trace has no operations.
      OSError: a file cannot be written.
    """
    assert recorder.recorded is not None
    files.write_trace(serialized)
    trace = xspace.read(serialized)
    task, tracer = step.trainer.task, tracer_of(step.runtime)
    specs = batch_specs(batch)
    lines = SourceLines(step.trainer, specs, step.partitioning)
    facts = StepFacts(
        name=step.name,
        steps=recorder.recorded,
        device_summary=step.runtime.device_summary,
        chip=tracer.chip_key(),
        mesh=step.mesh,
        layers=layer_scopes(task),
        kinds=kinds_of_layers(task),
        busy_cores=recorder.core_seconds / recorder.seconds,
        cores=len(os.sched_getaffinity(0)),
        useful_flops=step_flops(task, specs),
        tokens_per_step=task.target_tokens(specs),
        attainable=attainable(tracer, len(trace.devices)),
        source_of=lines.of,
    )
    summary = Summary(trace, facts)
    files.perfetto.write_bytes(encode(trace, summary.program))
    profile = summary.profile()
    result = ProfileResult(profile, files)
    if plan is not None:
        result = ProfileResult(profile, files, compare(profile, plan), calibrate(profile, plan))
    if processes.is_main():
        files.write(SUMMARY, profile)
        files.write(COMPARISON, result.comparison)
        files.write(CALIBRATION, result.calibration)
    return result


def tracer_of(runtime: Runtime) -> Tracer:
    """Returns the tracer of the library that a runtime runs its steps with."""
    return TensorFlowTracer() if isinstance(runtime, SingleDeviceRuntime) else JaxTracer()
