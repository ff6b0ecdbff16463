"""Runs tasks in processes of their own, or in this one, and collects their records."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lingvo_gshard.core import SilentProgress, UserError
from lingvo_gshard.wings.preparation.job import Job, Task

_SECONDS_BETWEEN_REPORTS = 0.25

# Is told how many rows, and how much of the work of the stage, are done since the last call.
Report = Callable[[int, float], None]


class Pool(contextlib.AbstractContextManager["Pool"]):
    """Runs tasks. The results do not depend on the number of workers. A context manager."""

    def __init__(self, job: Job, workers: int):
        """Starts processes; with one worker, all tasks are done in this process."""
        self._job = job
        self._workers = [_Worker(job) for _ in range(workers)] if workers > 1 else []

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()

    def run(self, tasks: Sequence[Task], kind: type, report: Report) -> Iterator[tuple[Task, Any]]:
        """Yields each task with its record, in the order of completion.

        Raises:
          UserError: a task refuses its input, or a worker was killed.
        """
        del kind
        if not self._workers:
            yield from self._run_here(tasks, report)
            return
        waiting, busy = iter(tasks), {}
        for worker in self._workers:
            worker.start_next(waiting, busy)
        while busy:
            for worker in _ready(busy):
                task = busy[worker]
                what, *content = worker.receive(task)
                if what == "done":
                    del busy[worker]
                    worker.start_next(waiting, busy)
                    yield task, content[0]
                else:
                    report(*content)

    def _run_here(self, tasks: Iterable[Task], report: Report) -> Iterator[tuple[Task, Any]]:
        for task in tasks:
            shares = _Shares(task, report)
            yield task, _perform(task, self._job, shares)


class _Shares(SilentProgress):
    """Turns the progress of a task into amounts of work of its stage."""

    def __init__(self, task: Task, report: Report):
        self._task, self._report = task, report
        self._done, self._told, self._share = 0, 0, 0.0
        self._last = time.monotonic()

    def update(self, done: int, share: float | None = None) -> None:
        self._done = done
        now = time.monotonic()
        if share is not None and now - self._last >= _SECONDS_BETWEEN_REPORTS:
            self._last = now
            self.send(share)

    def send(self, share: float) -> None:
        self._report(self._done - self._told, (share - self._share) * self._task.rows)
        self._told, self._share = self._done, share


def _perform(task: Task, job: Job, shares: _Shares) -> Any:
    """Does a task, records that it is done and returns the record."""
    record = task.run(job, shares)
    job.work.finish(task.name, record)
    shares.send(1.0)
    return record


class _Worker:
    """A process that does one task after another."""

    def __init__(self, job: Job):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, job), daemon=True)
        self._process.start()
        other.close()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._pipe.fileno()

    def start_next(self, waiting: Iterator[Task], busy: dict[_Worker, Task]) -> None:
        """Sends the next task, if there is one."""
        task = next(waiting, None)
        if task is not None:
            busy[self] = task
            # A worker that is gone is noticed when its answer is awaited.
            with contextlib.suppress(OSError):
                self._pipe.send(task)

    def receive(self, task: Task) -> tuple:
        """Returns a message of the worker; raises the error that its task has raised."""
        try:
            message = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise UserError(_death(self._process.exitcode, task)) from None
        if message[0] == "mistake":
            raise UserError(message[1])
        if message[0] == "bug":
            raise RuntimeError(f"A worker failed in {task.name}:\n{message[1]}")
        return message

    def kill(self) -> None:
        """Ends the process at once, which loses no finished work."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _ready(workers: Iterable[_Worker]) -> list[_Worker]:
    ready: Any = list(workers)
    found: Any = multiprocessing.connection.wait(ready)
    return found


def _death(code: int | None, task: Task) -> str:
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", as the system does if memory runs out; fewer `workers` need less"
    else:
        how = f"ended with exit code {code}"
    return (
        f"A worker {how}, while it worked on {task.name}. Finished work is kept: the same command "
        "goes on from there"
    )


def _work(pipe: multiprocessing.connection.Connection, job: Job) -> None:
    """Does tasks until the pipe is closed, which happens when the parent process ends."""
    # The terminal sends an interrupt to all processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Rows are no cyclic garbage, and there are many.
    gc.disable()
    try:
        while True:
            task = pipe.recv()
            pipe.send(_result(task, job, pipe))
            gc.collect()
    except (EOFError, OSError):
        os._exit(1)


def _end_with_parent() -> None:
    """Ends this process when its parent process ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _result(task: Task, job: Job, pipe: multiprocessing.connection.Connection) -> tuple:
    def report(rows: int, work: float) -> None:
        pipe.send(("progress", rows, work))

    shares = _Shares(task, report)
    try:
        return "done", _perform(task, job, shares)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except (UserError, OSError) as error:
        return "mistake", str(error)
    except Exception:
        return "bug", traceback.format_exc()
