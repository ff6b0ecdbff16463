"""A process that makes one plan. Its parent may end it at any time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection

import msgspec

from lingvo_gshard.core import Params, SilentProgress, UserError
from lingvo_gshard.wings.cluster.child_process import answer_stream, end_with_parent
from lingvo_gshard.wings.inference.programs.maker import row_parts
from lingvo_gshard.wings.planning import roofline
from lingvo_gshard.wings.planning.compiling.cache import Settings, using_settings
from lingvo_gshard.wings.planning.experiments import (
    PlanOptions,
    planned_partitioning,
    published_rows,
)
from lingvo_gshard.wings.planning.generation import GenerationOptions, plan_generation
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.machines.topologies import Topology
from lingvo_gshard.wings.planning.plan.plan import Plan
from lingvo_gshard.wings.planning.remedies import plan_to_fit
from lingvo_gshard.wings.planning.search.experiment_search import SearchOptions
from lingvo_gshard.wings.planning.search.machines import search_machines
from lingvo_gshard.wings.serving.planning.requests import GENERATE, PLAN, SEARCH, PlanRequest

_PACKAGE = "lingvo_gshard"
_BILLION = 1e9
# Remedies that are compiled if a step does not fit.
_REMEDIES = 4


class Task(msgspec.Struct, frozen=True):
    """A plan to make."""

    request: PlanRequest
    configs: Mapping[str, pathlib.Path]
    settings: Settings


class PlanAnswer(msgspec.Struct, frozen=True):
    """Plans that a request is answered with.

    Attributes:
      plans: the plan as asked, if there is one, then those that fit in its place. Of generation,
        decoding and prefill.
      problem: why there is no plan as asked; empty if there is one.
    """

    plans: list[Plan]
    problem: str = ""
    warnings: list[str] = []


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the worker: a stage, how much of it is done, or the end, which comes last."""

    stage: str = ""
    share: float | None = None
    problem: str = ""
    answer: PlanAnswer | None = None


class _ToldProgress(SilentProgress):
    """Tells the parent about stages, and the end."""

    def __init__(self, parent: Connection):
        self._parent = parent

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        self.tell(News(stage=stage))

    def update(self, done: int, share: float | None = None) -> None:
        if share is not None:
            self.tell(News(share=share))

    def say(self, text: str) -> None:
        self.tell(News(stage=text))

    def tell(self, news: News) -> None:
        """Sends a message to the parent."""
        self._parent.send_bytes(msgspec.msgpack.encode(news))


class _Warnings(logging.Handler):
    """Keeps the warnings of this package, each once."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a message."""
        if record.name.startswith(_PACKAGE):
            self.texts.setdefault(record.getMessage())


def plan(task: Task, progress: SilentProgress) -> PlanAnswer:
    """Returns what was planned for a task.

    Raises:
      UserError: the config is not understood, the mesh does not fit the machine, nothing that a
        search tried fits, or the compiler is missing or refuses the program.
    """
    request = task.request
    with using_settings(task.settings):
        params, topology = request.params(task.configs), topologies.get(request.topology)
        options = PlanOptions(mesh=request.mesh or None, strategy=request.strategy or None)
        if not (request.experiment or request.batch_rows or request.mode == GENERATE):
            is_search = request.mode == SEARCH
            params.input.batch_rows = published_rows(params, [topology], options, is_search)
        if request.mode == PLAN:
            found = plan_to_fit(params, topology, options, _REMEDIES, progress)
            plans, problem = [found.plan, *found.plans[1:]], found.problem
        elif request.mode == GENERATE:
            plans, problem = _generation(request, params, topology, options, progress), ""
        else:
            (searched,) = search_machines(params, [topology], SearchOptions(), progress)
            if searched.plan is None:
                raise UserError(f"no sharding that the search tried fits {request.topology}")
            plans, problem = [searched.plan], ""
    return PlanAnswer([_with_cost(each, request) for each in plans], problem)


def _generation(
    request: PlanRequest,
    params: Params,
    topology: Topology,
    options: PlanOptions,
    progress: SilentProgress,
) -> list[Plan]:
    """Returns the plans of decoding and prefill."""
    texts = request.batch_rows or row_parts(planned_partitioning(params, topology, options))
    asked = GenerationOptions(batch=texts)
    found = plan_generation(params, topology, options, asked, progress)
    named = {"decoding": found.step, "prefill": found.prefill}
    return [msgspec.structs.replace(each, change=name) for name, each in named.items() if each]


def _with_cost(plan: Plan, request: PlanRequest) -> Plan:
    """Returns a plan with the cost of the tokens that a request asks for, at its price."""
    if not plan.tokens_per_step:
        return plan
    topology = topologies.get(plan.topology)
    seconds = plan.seconds_per_step / plan.tokens_per_step
    spent = roofline.budget(request.tokens or _BILLION, seconds, topology)
    if request.price:
        price = spent.chip_hours * request.price
        spent = dataclasses.replace(spent, price=price, currency=spent.currency or "USD")
    return msgspec.structs.replace(plan, budget=spent)


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
    warned = _Warnings()
    logging.getLogger().addHandler(warned)
    try:
        answer = plan(task, progress)
        news = News(answer=msgspec.structs.replace(answer, warnings=list(warned.texts)))
    except UserError as error:
        news = News(problem=str(error))
    except Exception as error:
        # Standard error is the server's log.
        traceback.print_exc()
        news = News(problem=f"planning failed: {type(error).__name__}: {error}"[:2000])
    progress.tell(news)


if __name__ == "__main__":
    main()
