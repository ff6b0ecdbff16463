"""Registers the services of all runs. The loop calls them in this order."""

from __future__ import annotations

from lingvo_gshard.training import OBSERVERS, ObservedRun, StepObserver
from lingvo_gshard.wings.services import snapshots, step_reporter, trackers
from lingvo_gshard.wings.services.compilations import CompilationLog
from lingvo_gshard.wings.services.determinism import BatchDigests
from lingvo_gshard.wings.services.dev_evaluation import DevEvaluation
from lingvo_gshard.wings.services.display import Display
from lingvo_gshard.wings.services.divergence import LossWatch
from lingvo_gshard.wings.services.memory import Memory
from lingvo_gshard.wings.services.roll_back import RollBackWatch


def router_watch(run: ObservedRun) -> StepObserver | None:
    """Returns what watches the routers of a run, if its Params ask for it."""
    if not run.params.run.routers.every_steps:
        return None
    # Runs whose routers are not watched do not wait for what records and draws them.
    from lingvo_gshard.wings.services.routers.watch import RouterWatch

    return RouterWatch(run)


def choices(run: ObservedRun) -> StepObserver | None:
    """Returns what records or replays the choices of a run's routers, if its Params ask for it."""
    if not (run.params.run.record_choices or run.params.run.replay_choices):
        return None
    from lingvo_gshard.wings.services.routers.choices import Choices

    return Choices(run)


OBSERVERS.register("compilations")(CompilationLog)
OBSERVERS.register("step reporter")(step_reporter.reporter)
# Adds arrays to batches before routers are watched, and removes them before batches are digested.
OBSERVERS.register("choices")(choices)
OBSERVERS.register("routers")(router_watch)
# A step that is taken back is neither shown nor recorded.
OBSERVERS.register("roll backs")(RollBackWatch)
OBSERVERS.register("memory")(Memory)
OBSERVERS.register("batch digests")(BatchDigests)
OBSERVERS.register("display")(Display)
OBSERVERS.register("divergence")(LossWatch)
OBSERVERS.register("trackers")(trackers.tracking)
OBSERVERS.register("snapshots")(snapshots.snapshots)
OBSERVERS.register("dev evaluation")(DevEvaluation)
