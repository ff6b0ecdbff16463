"""Records how a run is started or resumed."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable

from lingvo_gshard.api.backend import Backend
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.training.run import processes
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.run.records import launch, sharding
from lingvo_gshard.training.run.runtime_protocol import Runtime
from lingvo_gshard.training.step.trainer import Trainer


def record_launch(
    logdir: Logdir,
    params: Params,
    trainer: Trainer,
    runtime: Runtime,
    backend: Backend,
    step: int,
    say: Callable[[str], None],
) -> None:
    """Writes command, versions, devices and sharding into the run's directory.

    Only the main process writes. If it cannot, it says so, and the run goes on.

    Args:
      logdir: the run's directory.
      params: the experiment.
      trainer: its trainer.
      runtime: what runs the trainer.
      backend: what made the runtime.
      step: the step that the run resumes from; 0 for a new run.
      say: shows a line to the user.
    """
    count = processes.count()
    if not backend.is_main:
        return
    row = launch.Launch(
        time=time.time(),
        step=step,
        steps=trainer.steps,
        experiment=params.name,
        command=launch.command_line(),
        directory=launch.directory(),
        host=platform.node(),
        processes=count,
        runtime=backend.kind,
        devices=runtime.device_summary,
        parameters=sum(math.prod(spec.shape) for spec in trainer.theta_specs.flatten()),
        active_parameters=trainer.task.active_parameters(),
        versions=launch.versions(),
        environment=launch.settings(launch.environment_at_start()),
    )
    try:
        launch.append(logdir.path, row)
        sharding.write(logdir.path, sharding.of_trainer(trainer, backend.partitioning))
    except OSError as error:
        say(f"Warning: how the run was started cannot be recorded ({error.strerror})")
