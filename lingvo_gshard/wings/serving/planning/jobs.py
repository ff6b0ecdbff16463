"""Plans that the page asks for, made one after the other in the background."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.serving.planning.process import PlanProcess
from lingvo_gshard.wings.serving.planning.requests import PlanRequest
from lingvo_gshard.wings.serving.planning.worker import News, PlanAnswer

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
# Results that are kept. A plan has some hundred kilobytes.
_MOST_KEPT = 100
# Jobs that may wait; each may take minutes.
_MOST_WAITING = 20
# Seconds that a plan under way has to end when the server stops.
_END_SECONDS = 5.0

_log = logging.getLogger("uvicorn.error")


@dataclasses.dataclass
class Job:
    """A plan that was asked for.

    Attributes:
      key: a name that only equal requests have.
      request: what to plan, without the content of a config when the job has ended.
      state: WAITING, RUNNING, DONE or FAILED.
      share: share of the stage that is done; None if unknown.
      began: when it was taken up, in the time of time.monotonic.
      seconds: how long it took; None before its end.
      answer: what was planned; None before the end, and if there is no plan.
      is_removed: whether nobody wants it any more.
    """

    key: str
    request: PlanRequest
    state: str = WAITING
    stage: str = ""
    share: float | None = None
    began: float | None = None
    seconds: float | None = None
    problem: str = ""
    answer: PlanAnswer | None = None
    is_removed: bool = False

    def to_record(self, with_answer: bool = False) -> dict[str, Any]:
        """Returns the job as a JSON value, without the content of a config."""
        now = None if self.began is None else time.monotonic() - self.began
        request = msgspec.structs.replace(self.request, content=None)
        record = {
            "id": self.key,
            "request": msgspec.to_builtins(request),
            "model": self.request.model,
            "state": self.state,
            "stage": self.stage,
            "share": self.share,
            "seconds": now if self.seconds is None else self.seconds,
            "problem": self.problem,
        }
        return record | {"answer": self.answer} if with_answer else record

    def hear(self, news: News) -> None:
        """Takes note of a stage, or of how much of it is done."""
        self.stage, self.share = news.stage or self.stage, news.share

    def end(self, problem: str = "", answer: PlanAnswer | None = None) -> None:
        """Ends the job with plans, or with the reason why there are none."""
        assert self.began is not None
        self.problem, self.answer = problem, answer
        self.seconds = time.monotonic() - self.began
        self.request = msgspec.structs.replace(self.request, content=None)
        self.state = FAILED if answer is None else DONE


# Makes the plans of a request, tells what it does, and gives up when it is over.
Run = Callable[[PlanRequest, Callable[[News], None], Callable[[], bool]], PlanAnswer]


class PlanJobs:
    """Has plans made, one after the other, and keeps them.

    A request that was answered before is answered at once. One that failed is tried again.
    """

    def __init__(self, configs: Mapping[str, pathlib.Path], run: Run | None = None):
        """Starts the thread that waits for plans, which `run` or a process makes."""
        self.configs = dict(configs)
        self._run = run or PlanProcess(configs)
        self._jobs: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="planner", daemon=True)
        self._thread.start()

    def submit(self, request: PlanRequest) -> Job:
        """Returns the job of a request. Raises UserError if it is wrong, or if too many wait."""
        request.check(self.configs)
        key = request.key
        with self._lock:
            job = self._jobs.get(key)
            if job and job.state != FAILED:
                return job
            waiting = self._count_waiting()
            if waiting >= _MOST_WAITING:
                raise UserError(f"{waiting} plans wait already; ask again when some are done")
            job = self._jobs[key] = Job(key, request)
            self._jobs.move_to_end(key)
            ended = [key for key, each in self._jobs.items() if each.state in (DONE, FAILED)]
            for one in ended[: max(len(self._jobs) - _MOST_KEPT, 0)]:
                del self._jobs[one]
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

    def remove(self, key: str) -> bool:
        """Forgets a job, and gives it up if it is under way. Returns whether there was one."""
        with self._lock:
            job = self._jobs.pop(key, None)
        if job is not None:
            job.is_removed = True
        return job is not None

    @property
    def waiting(self) -> int:
        """The number of plans that wait."""
        with self._lock:
            return self._count_waiting()

    def _count_waiting(self) -> int:
        return sum(job.state == WAITING for job in self._jobs.values())

    def close(self) -> None:
        """Gives up the plan under way, and ends the thread."""
        self._is_over.set()
        self._waiting.put(None)
        self._thread.join(_END_SECONDS)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None and not self._is_over.is_set():
            if job.is_removed:
                continue
            job.began, job.state = time.monotonic(), RUNNING
            is_over = functools.partial(self._is_given_up, job)
            try:
                job.end(answer=self._run(job.request, job.hear, is_over))
            except UserError as error:
                job.end(str(error))
            except Exception as error:  # The thread goes on with the next plan.
                _log.error("planning failed", exc_info=error)
                job.end("planning failed; the log of the server says why")

    def _is_given_up(self, job: Job) -> bool:
        return job.is_removed or self._is_over.is_set()
