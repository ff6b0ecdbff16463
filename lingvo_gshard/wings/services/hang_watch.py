"""HangWatch: ends a run that hangs, and reports the line of code that each process was at.

A run hangs if no step has ended for `run.hang_factor` times the median step, and for
`run.hang_seconds` at least. Compilations, evaluations and roll backs do not count, nor does
anything before the first step has ended. Checkpoints have a limit of their own,
`run.save_seconds`.
"""

from __future__ import annotations

import collections
import faulthandler
import queue
import statistics
import sys
import sysconfig
import threading
import time
import traceback

from lingvo_gshard.core import Params, processes
from lingvo_gshard.data import Batch
from lingvo_gshard.runtime import compilations
from lingvo_gshard.training import MetricsRow, StepObserver
from lingvo_gshard.wings.cluster.peer_monitor import RollCall, Snapshot

# Libraries wait for other threads and devices; the line that asked them to is more telling.
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
# grain's threads, which make batches in advance (data/batching/stream.py). They wait in a queue
# while there is nothing to do.
_PREFETCH, _IDLE = "grain-thread-prefetch", queue.__file__


def line_of(thread: threading.Thread, makes_batches: bool = False) -> str:
    """Returns the innermost line of a thread outside of libraries, as "file:line (function)".

    Args:
      makes_batches: whether the thread waits for a batch. If another thread is at work prefetching
        batches, the line of that thread is returned.
    """
    frames = sys._current_frames()
    if makes_batches:
        for other in threading.enumerate():
            if other.name.startswith(_PREFETCH) and other.ident in frames:
                stack = traceback.extract_stack(frames[other.ident])
                if all(frame.filename != _IDLE for frame in stack):
                    return _line(stack)
    if thread.ident not in frames:
        return "an ended thread"
    return _line(traceback.extract_stack(frames[thread.ident]))


def stacks() -> str:
    """Returns the stacks of all threads as text, the main one's first, innermost lines last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = sorted(sys._current_frames().items(), key=lambda pair: pair[0] != main)
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in found
    )


def _line(stack: traceback.StackSummary) -> str:
    frames = list(stack)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} ({frame.name})"


_STEPS_OF_MEDIAN = 100
_POLL_SECONDS = 1.0
# If a library blocks the interpreter for so much longer, no thread of Python can tell, and the
# stacks go to standard error.
_BLOCKED_SECONDS = 60.0


class HangWatch(StepObserver):
    """Watches the steps of this process in a thread of its own."""

    def __init__(self, params: Params, lifeline: RollCall):
        """Starts watching. A hang is reported to `lifeline`."""
        self._p = params
        self._lifeline = lifeline
        self._loop = threading.current_thread()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_STEPS_OF_MEDIAN)
        self._place, self._doing = (0, 0), "begins"
        self._other_work: str | None = "begins"
        # The limit of this work in seconds; None if it may take any time.
        self._other_limit: float | None = None
        # Since when a step, or other work that has a limit, should end; None if nothing should.
        self._since: float | None = None
        self._has_ended_a_step = False
        self._is_over = threading.Event()
        lifeline.answer_with(self.take_snapshot)
        if params.hang_factor:
            threading.Thread(target=self._watch, name="hang watch", daemon=True).start()

    def before_input(self, step: int) -> None:
        """Notes that the loop waits for a batch."""
        self._note((step, 0), f"waits for the batch of step {step:,}")

    def before_step(self, step: int, batch: Batch) -> None:
        """Notes that the loop starts a step."""
        self._note((step, 1), f"starts step {step:,}")

    def before_result(self, step: int) -> None:
        """Notes that the loop waits for the devices."""
        # The loop has started the next step by then.
        place, _ = self._place
        self._note((place, 2), f"waits for the devices to end step {step:,}")

    def before_other_work(self, what: str, limit: float | None = None) -> None:
        """Watches no step until the next one begins, but the other work if it has a limit."""
        self._since = None
        self._other_work, self._other_limit = what, limit
        self._since = None if limit is None else time.monotonic()
        faulthandler.cancel_dump_traceback_later()

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Measures a step."""
        now = time.monotonic()
        if self._since is not None:
            self._seconds.append(now - self._since)
        self._since, self._has_ended_a_step = now, True
        self._note((self._place[0], 3), f"records step {step:,}")

    def at_end(self) -> None:
        """Stops watching."""
        self._is_over.set()
        faulthandler.cancel_dump_traceback_later()

    def take_snapshot(self) -> Snapshot:
        """Returns where this process is."""
        part = self._place[1]
        busy = "compiles" if compilations.is_compiling() else self._other_work
        since, limit = self._since, self.limit
        is_late = since is not None and limit is not None and time.monotonic() - since > limit
        return Snapshot(
            processes.index(),
            self._place,
            busy or self._doing,
            line_of(self._loop, makes_batches=part == 0),
            stacks(),
            is_busy=busy is not None and not is_late,
        )

    @property
    def limit(self) -> float | None:
        """Seconds that the step or other work may take before it is a hang; None for no limit."""
        if self._other_work is not None:
            return self._other_limit
        if not self._seconds:
            return None
        median = statistics.median(self._seconds)
        return max(self._p.hang_seconds, self._p.hang_factor * median)

    def _note(self, place: tuple[int, int], doing: str) -> None:
        self._place, self._doing = place, doing
        if self._other_work is not None:
            self._other_work = None
            self._since = time.monotonic() if self._has_ended_a_step else None

    def _watch(self) -> None:
        poll, last = _POLL_SECONDS, time.monotonic()
        while not self._is_over.wait(poll):
            now, since, limit = time.monotonic(), self._since, self.limit
            # The whole process was stopped, or the machine slept: no step could have ended.
            asleep, last = max(0.0, now - last - poll - _POLL_SECONDS), now
            if since is None or limit is None:
                continue
            poll = min(_POLL_SECONDS, limit / 10)
            if compilations.is_compiling():
                faulthandler.cancel_dump_traceback_later()
                self._since = now
                continue
            if asleep:
                self._since = since = since + asleep
            # It does not end the process, which may just have been stopped for long.
            faulthandler.dump_traceback_later(limit + _BLOCKED_SECONDS, file=2)
            if now - since > limit:
                self._lifeline.report_hang(self._words(now - since))
                # Another process was only busy: a new wait begins.
                self._since = time.monotonic()

    def _words(self, seconds: float) -> str:
        if self._other_work is not None:
            return f"the run {self._other_work} for {seconds:.0f} s (the limit is {self.limit:g} s)"
        median = statistics.median(self._seconds)
        return f"no step has ended for {seconds:.0f} s (the median step takes {median:.3g} s)"
