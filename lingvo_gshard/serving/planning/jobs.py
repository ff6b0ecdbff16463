"""Plans that the page asks for, made one after the other in the background."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.api.importing import open_model
from lingvo_gshard.core.config import names, registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.progress import SilentProgress
from lingvo_gshard.planning.compiling.cache import Settings, using_settings
from lingvo_gshard.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.planning.machines import topologies
from lingvo_gshard.planning.plan.plan import Plan
from lingvo_gshard.planning.search.experiment_search import SearchOptions
from lingvo_gshard.planning.search.machines import search_machines
from lingvo_gshard.training.step import precision

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
# Results that are kept. A plan has some hundred kilobytes.
_MOST_KEPT = 100
# Jobs that may wait; each may take minutes.
_MOST_WAITING = 20

Number = Annotated[int, Meta(ge=0, le=10**9)]


class PlanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what to plan. One of `experiment`, `config` and `content` names the model.

    Attributes:
      topology: the machine.
      experiment: name of an experiment.
      config: name of a config that the server offers.
      content: a config.json.
      title: what the page calls the content.
      mesh: axes and sizes; empty for the experiment's, else one axis of all devices.
      strategy: name or table of a strategy; empty for the experiment's.
      batch_rows: rows of a batch; 0 for the experiment's.
      length: positions of a row of a config; 0 for what the model was made for.
      precision: types of weights and activations; empty for the experiment's.
      mode: "plan" plans this sharding, "search" searches the fastest one.
    """

    topology: str
    experiment: str = ""
    config: str = ""
    content: dict[str, Any] | None = None
    title: str = ""
    mesh: str = ""
    strategy: str = ""
    batch_rows: Number = 0
    length: Number = 0
    precision: str = ""
    mode: Literal["plan", "search"] = "plan"

    @property
    def key(self) -> str:
        """A name that only equal requests have."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    @property
    def model(self) -> str:
        """The model in words."""
        return self.experiment or self.config or self.title or "config.json"

    def check(self, configs: Mapping[str, pathlib.Path]) -> None:
        """Raises ValueError if it does not say which model, or names a machine there is not."""
        given = [bool(self.experiment), bool(self.config), self.content is not None]
        if sum(given) != 1:
            raise UserError(
                f"{sum(given)} models are given; one of experiment, config and content was expected"
            )
        # Any other name would have its module imported.
        for name, value, known in (
            ("experiment", self.experiment, registry.names()),
            ("config", self.config, tuple(configs)),
            ("precision", self.precision, tuple(precision.PRECISIONS)),
        ):
            if value and value not in known:
                raise UserError(f"{name} is {value!r}. {names.nearest(value, known)}")
        topologies.get(self.topology)

    def params(self, configs: Mapping[str, pathlib.Path]) -> Params:
        """Returns the Params of the model.

        Raises:
          UserError: there is no such experiment, or the config is not understood.
        """
        if self.experiment:
            return experiment(self.experiment, settings=self._settings(self.precision))
        with contextlib.ExitStack() as stack:
            path = configs.get(self.config)
            if path is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                path = pathlib.Path(folder) / "config.json"
                path.write_text(json.dumps(self.content), encoding="utf-8")
            return open_model(
                path,
                length=self.length,
                precision=self.precision or "bfloat16",
                settings=self._settings(""),
            )

    def _settings(self, precision: str) -> list[str]:
        rows = [f"input.batch_rows = {self.batch_rows}"] if self.batch_rows else []
        return rows + ([f"step.precision = {precision!r}"] if precision else [])


@dataclasses.dataclass
class Job:
    """A plan that was asked for.

    Attributes:
      request: what to plan.
      state: WAITING, RUNNING, DONE or FAILED.
      stage: what is being done.
      share: share of the stage that is done; None if unknown.
      began: when it was taken up, in the time of time.monotonic.
      seconds: how long it took; None before its end.
      problem: why it failed.
      plan: the plan, when it is done.
    """

    request: PlanRequest
    state: str = WAITING
    stage: str = ""
    share: float | None = None
    began: float | None = None
    seconds: float | None = None
    problem: str = ""
    plan: Plan | None = None

    def to_record(self, with_plan: bool = False) -> dict[str, Any]:
        """Returns the job as a JSON value."""
        now = None if self.began is None else time.monotonic() - self.began
        record = {
            "id": self.request.key,
            "request": msgspec.to_builtins(self.request),
            "model": self.request.model,
            "state": self.state,
            "stage": self.stage,
            "share": self.share,
            "seconds": now if self.seconds is None else self.seconds,
            "problem": self.problem,
        }
        return record | {"plan": self.plan} if with_plan else record


class _JobProgress(SilentProgress):
    """Writes the stage of a plan into its job."""

    def __init__(self, job: Job):
        self._job = job

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        self._job.stage, self._job.share = stage, None

    def update(self, done: int, share: float | None = None) -> None:
        self._job.share = share


Run = Callable[[PlanRequest, Params, SilentProgress], Plan]


def run_request(request: PlanRequest, params: Params, progress: SilentProgress) -> Plan:
    """Returns the plan that a request asks for.

    Raises:
      UserError: the mesh does not fit the machine, nothing that a search tried fits, or the
        compiler is missing or refuses the program.
    """
    topology = topologies.get(request.topology)
    if request.mode == "plan":
        options = PlanOptions(mesh=request.mesh or None, strategy=request.strategy or None)
        return plan_experiment(params, topology, options, progress)
    (found,) = search_machines(params, [topology], SearchOptions(), progress)
    if found.plan is None:
        raise UserError(f"no sharding that the search tried fits {request.topology}")
    return found.plan


class PlanJobs:
    """Makes plans on a thread, one after the other, and keeps them.

    A request that was answered before is answered at once. One that failed is tried again.
    """

    def __init__(
        self,
        configs: Mapping[str, pathlib.Path],
        settings: Settings | None = None,
        run: Run = run_request,
    ):
        """Starts the thread.

        Args:
          configs: name of each config that requests may name -> its file.
          settings: how the planner compiles.
          run: makes a plan.
        """
        self.configs = dict(configs)
        self._settings, self._run = settings or Settings(), run
        self._jobs: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="planner", daemon=True)
        self._thread.start()

    def submit(self, request: PlanRequest) -> Job:
        """Returns the job of a request, which is made in the background.

        Raises:
          UserError: the request is wrong, or too many wait.
        """
        request.check(self.configs)
        with self._lock:
            job = self._jobs.get(request.key)
            if job and job.state != FAILED:
                return job
            waiting = sum(job.state == WAITING for job in self._jobs.values())
            if waiting >= _MOST_WAITING:
                raise UserError(f"{waiting} plans wait already; ask again when some are done")
            job = self._jobs[request.key] = Job(request)
            self._jobs.move_to_end(request.key)
            ended = [key for key, each in self._jobs.items() if each.state in (DONE, FAILED)]
            for key in ended[: max(len(self._jobs) - _MOST_KEPT, 0)]:
                del self._jobs[key]
        self._waiting.put(job)
        return job

    def get(self, key: str) -> Job | None:
        """Returns the job with an id; None if there is none."""
        with self._lock:
            return self._jobs.get(key)

    def all(self) -> list[Job]:
        """Returns all jobs, those asked for last at the end."""
        with self._lock:
            return list(self._jobs.values())

    def close(self) -> None:
        """Ends the thread after the plan under way."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            job.began, job.state = time.monotonic(), RUNNING
            try:
                with using_settings(self._settings):
                    params = job.request.params(self.configs)
                    plan = self._run(job.request, params, _JobProgress(job))
                job.plan, job.state = plan, DONE
            except UserError as error:
                job.problem, job.state = str(error), FAILED
            except Exception as error:  # The thread goes on with the next plan.
                job.problem = f"planning failed: {type(error).__name__}: {error}"
                job.state = FAILED
            job.seconds = time.monotonic() - job.began
