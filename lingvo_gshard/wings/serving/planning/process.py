"""Makes each plan in a process of its own, with limits, so that no plan harms the next ones."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection

import msgspec

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.cluster.child_process import start_module
from lingvo_gshard.wings.planning.compiling.cache import Settings
from lingvo_gshard.wings.serving.planning.requests import PlanRequest
from lingvo_gshard.wings.serving.planning.worker import News, PlanAnswer, Task

_MODULE = "lingvo_gshard.wings.serving.planning.worker"
_POLL_SECONDS = 0.2
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True)
class PlanLimits:
    """The limits of one plan: its seconds, and the resident memory of its processes."""

    seconds: float = 3600.0
    bytes: int = int(0.75 * os.sysconf("SC_PHYS_PAGES")) * _PAGE


class PlanProcess:
    """Makes plans, each in a process of its own."""

    def __init__(
        self,
        configs: Mapping[str, pathlib.Path],
        settings: Settings | None = None,
        limits: PlanLimits | None = None,
    ):
        self.limits = limits or PlanLimits()
        self._configs, self._settings = dict(configs), settings or Settings()

    def __call__(
        self, request: PlanRequest, tell: Callable[[News], None], is_over: Callable[[], bool]
    ) -> PlanAnswer:
        """Returns the plans of a request. Raises UserError at a limit, or when `is_over`."""
        process = start_module(_MODULE, stderr=None)
        try:
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):
                pickle.dump(Task(request, self._configs, self._settings), process.stdin)
                process.stdin.flush()
            for news in self._news(process, is_over):
                if news.problem:
                    raise UserError(news.problem)
                if news.answer:
                    return news.answer
                tell(news)
        finally:
            # Other processes of the plan end with this one.
            process.kill()
            process.communicate()
        raise UserError(_ended(process.returncode))

    def _news(
        self, process: subprocess.Popen[bytes], is_over: Callable[[], bool]
    ) -> Iterator[News]:
        """Yields what a process tells. Raises UserError if it passes a limit."""
        assert process.stdout
        end = time.monotonic() + self.limits.seconds
        with Connection(os.dup(process.stdout.fileno()), writable=False) as worker:
            while not is_over():
                is_ready = worker.poll(_POLL_SECONDS)
                self._check(process.pid, end)
                try:
                    if is_ready:
                        yield msgspec.msgpack.decode(worker.recv_bytes(), type=News)
                except (EOFError, OSError):  # The process has ended.
                    process.wait()
                    return
        raise UserError("the plan was given up")

    def _check(self, pid: int, end: float) -> None:
        if time.monotonic() > end:
            raise UserError(
                f"the plan took longer than {self.limits.seconds:,.0f} s, the limit of this "
                "server; start it with a larger `plan_seconds`, or plan fewer devices"
            )
        if resident_bytes(pid) > self.limits.bytes:
            raise UserError(
                f"the plan took more than {self.limits.bytes / 2**30:,.1f} GiB of memory, the "
                "limit of this server; start it with a larger `plan_gib`, or plan fewer devices"
            )


def _ended(code: int) -> str:
    """Returns how a process ended that made no plan."""
    if code < 0:
        return (
            f"the plan's process was ended by {signal.Signals(-code).name}: the machine ran out of "
            "memory, somebody ended it, or a compiler failed. Other plans go on; ask again, or "
            "plan fewer devices"
        )
    return (
        f"the plan's process ended with exit code {code} and no plan; the log of the server may "
        "say why"
    )


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process and of all that it has started."""
    found, left = 0, [pid]
    while left:
        place = pathlib.Path(f"/proc/{left.pop()}")
        with contextlib.suppress(OSError, ValueError, IndexError):  # It has ended meanwhile.
            found += int((place / "statm").read_text().split()[1]) * _PAGE
        for children in place.glob("task/*/children"):
            with contextlib.suppress(OSError):  # The thread has ended.
                left += map(int, children.read_text().split())
    return found
