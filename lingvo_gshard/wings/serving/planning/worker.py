"""A process that makes one plan. Its parent may end it at any time."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

import msgspec

from lingvo_gshard.core import SilentProgress, UserError
from lingvo_gshard.wings.cluster.child_process import answer_stream, end_with_parent
from lingvo_gshard.wings.planning.compiling.cache import Settings, using_settings
from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.search.experiment_search import SearchOptions
from lingvo_gshard.wings.planning.search.machines import search_machines
from lingvo_gshard.wings.serving.planning.requests import PlanRequest


class Task(msgspec.Struct, frozen=True):
    """A plan to make."""

    request: PlanRequest
    configs: Mapping[str, pathlib.Path]
    settings: Settings


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the worker: a stage, how much of it is done, or the end, which comes last."""

    stage: str = ""
    share: float | None = None
    problem: str = ""
    plan: Plan | None = None


class _ToldProgress(SilentProgress):
    """Tells the parent about stages, and the end."""

    def __init__(self, parent: Connection):
        self._parent = parent

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        self.tell(News(stage=stage))

    def update(self, done: int, share: float | None = None) -> None:
        if share is not None:
            self.tell(News(share=share))

    def tell(self, news: News) -> None:
        """Sends a message to the parent."""
        self._parent.send_bytes(msgspec.msgpack.encode(news))


def plan(task: Task, progress: SilentProgress) -> Plan:
    """Returns the plan of a task.

    Raises:
      UserError: the config is not understood, the mesh does not fit the machine, nothing that a
        search tried fits, or the compiler is missing or refuses the program.
    """
    request = task.request
    with using_settings(task.settings):
        params, topology = request.params(task.configs), topologies.get(request.topology)
        if request.mode == "plan":
            options = PlanOptions(mesh=request.mesh or None, strategy=request.strategy or None)
            return plan_experiment(params, topology, options, progress)
        (found,) = search_machines(params, [topology], SearchOptions(), progress)
    if found.plan is None:
        raise UserError(f"no sharding that the search tried fits {request.topology}")
    return found.plan


# A machine that runs out of memory ends the process with the highest score first.
_FIRST_TO_END = "1000"


def main() -> None:
    """Makes the plan of the Task that comes on standard input."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_END)
    # Compilers may print.
    answers = answer_stream()
    # The stream closes its descriptor when it is no longer used.
    progress = _ToldProgress(Connection(os.dup(answers.fileno()), readable=False))
    task: Task = pickle.load(sys.stdin.buffer)
    end_with_parent()
    try:
        news = News(plan=plan(task, progress))
    except UserError as error:
        news = News(problem=str(error))
    except Exception as error:
        # Standard error is the server's log.
        traceback.print_exc()
        news = News(problem=f"planning failed: {type(error).__name__}: {error}"[:2000])
    progress.tell(news)


if __name__ == "__main__":
    main()
