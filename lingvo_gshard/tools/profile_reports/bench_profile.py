"""Profiles a training step that gshard-bench measures."""

from __future__ import annotations

import pathlib
import re

import rich.console

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.profiling.files import ProfileFiles
from lingvo_gshard.profiling.observer import ProfiledStep, write_profile
from lingvo_gshard.profiling.steps import StepRange
from lingvo_gshard.profiling.tracer import Recorder
from lingvo_gshard.profiling.tracers import tracer_of
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.tools.benchmarks.step import StepCase
from lingvo_gshard.tools.profile_reports.profile_report import print_result

_STEPS = StepRange(1, 3)


def profile_case(
    case: StepCase, runtime: SingleDeviceRuntime, directory: str, console: rich.console.Console
) -> None:
    """Takes some steps of a measured model, writes their profile and prints it.

    Args:
      case: the model and its batch.
      runtime: has compiled the step, and its state.
      directory: gets a folder for each model.
      console: where to print.
    """
    recorder = Recorder(tracer_of(runtime))
    for step in range(_STEPS.first, _STEPS.last + 1):
        recorder.begin(step)
        recorder.start_step()
        runtime.train_step(case.batch).read()
    trace = recorder.end()
    name = re.sub(r"[^\w.]+", "_", case.name)
    files = ProfileFiles(pathlib.Path(directory) / name, _STEPS)
    step = ProfiledStep(case.name, case.trainer, runtime, None)
    print_result(write_profile(step, recorder, trace, case.batch, files), console)


def make_directory(directory: str) -> None:
    """Makes the directory of --profile; ValueError names the flag if that is impossible."""
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--profile={directory} cannot be written: {reason}") from error
