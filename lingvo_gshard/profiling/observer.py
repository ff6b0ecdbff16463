"""The observer that profiles some steps of a training run."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

from lingvo_gshard.data.input import Batch
from lingvo_gshard.planning.calibration import Calibration
from lingvo_gshard.planning.kinds import kinds_of_layers
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.planned_program import layer_scopes
from lingvo_gshard.profiling import steps as steps_lib
from lingvo_gshard.profiling.attainable import attainable
from lingvo_gshard.profiling.comparison import Comparison, calibrate, check_plan, compare
from lingvo_gshard.profiling.files import ProfileFiles
from lingvo_gshard.profiling.profile import Profile
from lingvo_gshard.profiling.sources import SourceLines
from lingvo_gshard.profiling.steps import StepRange
from lingvo_gshard.profiling.summary import StepFacts, Summary
from lingvo_gshard.profiling.traces import xspace
from lingvo_gshard.profiling.traces.recorder import Recorder
from lingvo_gshard.profiling.traces.tracers import tracer_of
from lingvo_gshard.runtime.step_compiler import batch_specs
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training import processes
from lingvo_gshard.training.monitoring.metrics import Row
from lingvo_gshard.training.observers.step_observer import (
    ObservedRun,
    ObserverFactory,
    StepObserver,
)
from lingvo_gshard.training.runtime_protocol import Runtime
from lingvo_gshard.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class ProfileResult:
    """A finished profile.

    Attributes:
      profile: where the time went.
      files: the folder with the trace and the summary.
      comparison: predicted beside measured time; None without a plan.
      calibration: their ratios; None without a plan, or if it was calibrated itself.
    """

    profile: Profile
    files: ProfileFiles
    comparison: Comparison | None = None
    calibration: Calibration | None = None


OnProfile = Callable[[ProfileResult], None]


@dataclasses.dataclass(frozen=True)
class ProfiledStep:
    """The training step to profile.

    Attributes:
      name: the experiment.
      trainer: the trainer.
      runtime: what runs the steps.
      partitioning: mesh and strategy; None on one device.
    """

    name: str
    trainer: Trainer
    runtime: Runtime
    partitioning: Partitioning | None

    @classmethod
    def of_run(cls, run: ObservedRun) -> ProfiledStep:
        """Returns the training step of a run."""
        return cls(run.params.name, run.trainer, run.runtime, run.partitioning)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the step; of one device, an axis of size 1."""
        return self.partitioning.mesh if self.partitioning else Mesh((("data", 1),))


def profile_steps(
    steps: StepRange, on_profile: OnProfile, plan: Plan | None = None, plan_path: str = ""
) -> ObserverFactory:
    """Returns a function that makes the profiler of a run, as `train` takes it.

    Args:
      steps: the steps to profile.
      on_profile: is called in the main process, when the steps have been profiled.
      plan: a plan of the run's step to compare with; None compares with nothing.
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
        """Makes the observer of a run.

        Args:
          run: the run.
          steps: the steps to profile.
          on_profile: is called in the main process.
          plan: a plan of the run's step to compare with.
        """
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

    def after_step(self, step: int, row: Row) -> None:
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
            self._run.say(f"Warning: {steps_lib.FLAG}: no profile: {type(error).__name__}: {error}")

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

    Args:
      step: the step that was recorded.
      recorder: recorded it, and has ended.
      serialized: the trace, as the recorder returned it.
      batch: a batch of the step.
      files: where to write.
      plan: a plan of the step to compare with.

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
        seconds_per_step=recorder.seconds / recorder.recorded.count,
        busy_cores=recorder.core_seconds / recorder.seconds,
        cores=len(os.sched_getaffinity(0)),
        useful_flops=task.step_flops(specs),
        tokens_per_step=task.target_tokens(specs),
        attainable=attainable(tracer, len(trace.devices)),
        source_of=lines.of,
    )
    summary = Summary(trace, facts)
    files.write_perfetto(trace, summary.program)
    profile = summary.profile()
    result = ProfileResult(profile, files)
    if plan is not None:
        result = ProfileResult(profile, files, compare(profile, plan), calibrate(profile, plan))
    if processes.is_main():
        files.write_summary(profile)
        if result.comparison is not None:
            files.write_comparison(result.comparison, result.calibration)
    return result
