"""Snapshot: where a process is, with the line of code and the stacks of all of its threads."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback

import msgspec

# Libraries wait for other threads and devices; the line that asked them to is more telling.
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
# The threads that make batches in advance (data/batching/prefetch.py), and their line when idle.
_PREFETCH, _IDLE = "prefetch", "concurrent/futures/thread.py"


class Snapshot(msgspec.Struct, frozen=True, tag="stacks"):
    """What a process was doing at one moment.

    Attributes:
      process: number of the process.
      place: how far its training loop is: step, and number of the part within the step. A process
        that others wait for is behind them.
      doing: what it does, in words that follow "it", such as "waits for the batch of step 7".
      line: the line of code, as "file:line (function)".
      stacks: the stacks of all threads, as text.
      is_busy: whether it does something that may take long, such as compiling.
    """

    process: int
    place: tuple[int, int]
    doing: str
    line: str
    stacks: str
    is_busy: bool = False


def line_of(thread: threading.Thread, makes_batches: bool = False) -> str:
    """Returns the innermost line of a thread outside of libraries, as "file:line (function)".

    Args:
      thread: the thread.
      makes_batches: whether the thread waits for a batch. The line is then that of a thread that
        prefetches batches, if there is one at work.
    """
    frames = sys._current_frames()
    if makes_batches:
        for other in threading.enumerate():
            if other.name.startswith(_PREFETCH) and other.ident in frames:
                stack = traceback.extract_stack(frames[other.ident])
                if not stack[-1].filename.endswith(_IDLE):
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
