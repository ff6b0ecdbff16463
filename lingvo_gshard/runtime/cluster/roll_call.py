"""RollCall: asks all processes where they are when one of them notices that no step ends.

Any process may notice it, since all wait for the one that is stuck. It tells process 0, which asks
every process for a snapshot over the connections of the PeerMonitor. The process that is furthest
behind, or does not answer, is the one that the others wait for. Process 0 writes the stacks of all
to a file of the run's directory and ends them. If a process is only busy, as with a compilation,
nothing happens.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable

import msgspec

from lingvo_gshard.training.observers.snapshot import Snapshot

# A process whose interpreter runs answers within milliseconds.
_ANSWER_SECONDS = 10.0
# The disk may be what hangs.
_WRITE_SECONDS = 5.0
# The part of a step in which a process waits for the devices (HangWatch).
_WAITS_FOR_DEVICES = 2


class Hang(msgspec.Struct, frozen=True, tag="hang"):
    """Tells process 0 that no step ends.

    Attributes:
      words: for how long.
    """

    words: str


class StacksWanted(msgspec.Struct, frozen=True, tag="wanted"):
    """Asks a process for its snapshot."""


# Sends a message to a process; None sends it to all others.
Send = Callable[[int | None, msgspec.Struct], None]
# Ends all processes; takes the number of the one that is stuck, and the reason in words.
EndAll = Callable[[int, str], None]


class RollCall:
    """Finds the process that is stuck."""

    def __init__(
        self,
        index: int,
        count: int,
        send: Send,
        end_all: EndAll,
        directory: Callable[[], pathlib.Path | None],
    ):
        """Prepares to ask and to answer.

        Args:
          index: number of this process.
          count: number of processes.
          send: sends a message to other processes.
          end_all: ends all processes; called in process 0.
          directory: returns the run's directory; None if there is none.
        """
        self._index, self._count = index, count
        self._send, self._end_all, self._directory = send, end_all, directory
        self._take_snapshot: Callable[[], Snapshot] | None = None
        self._answers: dict[int, Snapshot] = {}
        self._has_news = threading.Condition()
        self._is_calling = threading.Lock()
        self._was_asked = threading.Event()

    def answer_with(self, take_snapshot: Callable[[], Snapshot]) -> None:
        """Sets the function that answers other processes which ask where this one is."""
        self._take_snapshot = take_snapshot

    def report_hang(self, words: str) -> None:
        """Ends all processes if one of them is stuck. Returns if a process is only busy.

        Args:
          words: for how long no step has ended.
        """
        if self._index == 0:
            self._call(words)
            return
        self._was_asked.clear()
        self._send(0, Hang(words))
        if not self._was_asked.wait(3 * _ANSWER_SECONDS):
            self._end_all(0, f"does not answer; {words}")

    def on_message(self, message: Hang | StacksWanted | Snapshot) -> None:
        """Handles a message of another process, in the thread that received it."""
        if isinstance(message, StacksWanted):
            self._was_asked.set()
            if self._take_snapshot is not None:
                self._send(0, self._take_snapshot())
        elif isinstance(message, Snapshot):
            with self._has_news:
                self._answers[message.process] = message
                self._has_news.notify_all()
        else:
            threading.Thread(target=self._call, args=[message.words], daemon=True).start()

    def _call(self, words: str) -> None:
        """Asks all processes, in process 0."""
        if not self._is_calling.acquire(blocking=False):
            return
        try:
            found = self._ask()
            if any(snapshot.is_busy for snapshot in found.values()):
                return
            file = self._write(words, found)
            process, reason = _verdict(found, self._count)
            self._end_all(process, f"{reason}; {words}{file}")
        finally:
            self._is_calling.release()

    def _ask(self) -> dict[int, Snapshot]:
        """Returns the snapshots of the processes that answer, by number."""
        assert self._take_snapshot is not None
        with self._has_news:
            self._answers = {}
            self._send(None, StacksWanted())
            self._has_news.wait_for(lambda: len(self._answers) == self._count - 1, _ANSWER_SECONDS)
            return {0: self._take_snapshot(), **self._answers}

    def _write(self, words: str, found: dict[int, Snapshot]) -> str:
        """Writes all stacks to a file. Returns where they are, in words."""
        directory = self._directory()
        if directory is None:
            return ""
        step = min(snapshot.place[0] for snapshot in found.values())
        path = directory / f"hang-{step}.txt"
        parts = [
            f"Process {process} of {self._count}: it {one.doing}, at {one.line}\n\n{one.stacks}\n"
            for process, one in sorted(found.items())
        ]
        text = "\n".join([f"{words}\n", *parts])
        writer = threading.Thread(target=_write_text, args=[path, text], daemon=True)
        writer.start()
        writer.join(_WRITE_SECONDS)
        return "" if writer.is_alive() else f"; {path} has the stacks of all threads"


def _verdict(found: dict[int, Snapshot], count: int) -> tuple[int, str]:
    """Returns the process that is stuck, and words that follow its number."""
    silent = [process for process in range(count) if process not in found]
    if silent:
        return silent[0], "does not answer: it is stopped, or a library blocks its interpreter"
    last = min(found.values(), key=lambda snapshot: (snapshot.place, snapshot.process))
    where = f"{last.doing}, at {last.line}"
    if count > 1 and len({snapshot.place for snapshot in found.values()}) == 1:
        if last.place[1] == _WAITS_FOR_DEVICES:
            where = f"{where}: a device or a collective does not end"
        return last.process, f"is stuck like all others: it {where}"
    return last.process, f"is stuck: it {where}"


def _write_text(path: pathlib.Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(text, encoding="utf-8")
