"""Tells every process of a cluster when another one is gone, or when no step ends.

Each process keeps the connection that it opened at the rendezvous. The operating system closes it
when the process ends, however it ends, and TCP keepalive finds a machine that vanished. Process 0
then tells the others. Without this, a survivor would wait in a collective that never ends until
jax's heartbeats abort it.

Any process may notice that no step ends, since all wait for the stuck process. The process that
notices tells process 0. Process 0 asks every process for a snapshot over the connections of the
PeerMonitor. The stuck process is furthest behind, or does not answer. Process 0 writes the stacks
of all processes to a file of the run's directory and ends all processes. If a process is only busy,
as with a compilation, nothing happens.
"""

from __future__ import annotations

import contextlib
import pathlib
import selectors
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from lingvo_gshard.wings.cluster.rendezvous import send_line

# A process whose interpreter runs answers within milliseconds.
_ANSWER_SECONDS = 10.0
# The disk may be what hangs.
_WRITE_SECONDS = 5.0
# The number that `HangWatch` gives to the part of a step that waits for the devices.
_WAITS_FOR_DEVICES = 2


class Hang(msgspec.Struct, frozen=True, tag="hang"):
    """Tells process 0 that no step ends, and in words for how long."""

    words: str


class StacksWanted(msgspec.Struct, frozen=True, tag="wanted"):
    """Asks a process for its snapshot."""


# Sends a message to a process; None sends it to all others.
Send = Callable[[int | None, msgspec.Struct], None]
# Ends all processes; takes the number of the stuck process, and the reason in words.
EndAll = Callable[[int, str], None]


class Snapshot(msgspec.Struct, frozen=True, tag="stacks"):
    """The place of a process in its work at one moment.

    Attributes:
      place: the progress of the process's training loop: the step, and the number of the part
        within the step. A process that delays the others has the lowest place.
      doing: the process's work as a verb phrase, such as "waits for the batch of step 7".
      line: the line of code, as "file:line (function)".
      stacks: the stacks of all threads, as text.
      is_busy: whether the work may take long, as a compilation does.
    """

    process: int
    place: tuple[int, int]
    doing: str
    line: str
    stacks: str
    is_busy: bool = False


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
        """Sets the function that tells other processes the place of this process."""
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
    """Returns the number of the stuck process, and the reason as a verb phrase."""
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


# A machine that does not answer counts as gone after about 10 + 4 * 5 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
# The same for a machine that vanished while bytes were on their way to it, in milliseconds.
_USER_TIMEOUT = 30_000
_LINGER_SECONDS = 10.0


class Done(msgspec.Struct, tag="done"):
    """The message of a process that ends in good order."""


class Departure(msgspec.Struct, frozen=True, tag="left"):
    """The message that a process leaves the others before the program's end.

    Attributes:
      reason: the reason as a verb phrase about the process, such as "is gone".
      exit_code: exit code for the other processes.
      is_sudden: whether the process could not send the message itself.
    """

    process: int
    reason: str
    exit_code: int
    is_sudden: bool = False


_DECODER = msgspec.json.Decoder(Done | Departure | Hang | StacksWanted | Snapshot)


class PeerMonitor:
    """Watches the other processes in a thread of its own."""

    def __init__(
        self,
        index: int,
        connections: dict[int, socket.socket],
        on_departure: Callable[[Departure], bool],
        end: Callable[[int], None],
        on_message: Callable[[Hang | StacksWanted | Snapshot], None] = lambda _: None,
    ):
        """Starts watching.

        Args:
          connections: process -> connection; process 0 has one to each other process, the others
            have one to process 0.
          on_departure: called in the thread with the first departure. True means that this process
            shall end.
          end: ends this process with an exit code. Called in the thread once the others have heard
            of the departure.
          on_message: called in the thread with each message about a hang.
        """
        self._index = index
        self._on_message = on_message
        self._is_sending = threading.Lock()
        self._on_departure = on_departure
        self._end = end
        self._connections = dict(connections)
        self._finished: set[int] = set()
        self._received = dict.fromkeys(connections, b"")
        self._departure: Departure | None = None
        self._is_alone = threading.Event()
        self._selector = selectors.DefaultSelector()
        for process, connection in connections.items():
            _enable_keepalive(connection)
            self._selector.register(connection, selectors.EVENT_READ, process)
        threading.Thread(target=self._watch, name="peer_monitor", daemon=True).start()

    def announce_done(self) -> None:
        """Tells the others that this process ends in good order."""
        self._broadcast(Done())

    def announce_departure(self, departure: Departure) -> None:
        """Tells the other processes that a process, usually this one, leaves.

        Process 0 then waits until they have ended, since jax aborts processes that lose it.
        """
        self._broadcast(departure)
        if self._index == 0:
            self._is_alone.wait(_LINGER_SECONDS)

    def send(self, process: int | None, message: msgspec.Struct) -> None:
        """Sends a message to a process; None sends it to all that this one is connected to."""
        for other, connection in list(self._connections.items()):
            if process in (None, other):
                # Messages of several threads must not mix.
                with self._is_sending:
                    send_line(connection, message)

    def _broadcast(self, message: msgspec.Struct, excluded: int | None = None) -> None:
        for process in list(self._connections):
            if process != excluded:
                self.send(process, message)

    def _watch(self) -> None:
        deadline = None
        while self._connections and (deadline is None or time.monotonic() < deadline):
            for key, _ in self._selector.select(timeout=0.2):
                departure = self._receive(key.data)
                if departure is None or self._departure is not None:
                    continue
                self._departure = departure
                if self._index == 0:
                    self._broadcast(departure, excluded=departure.process)
                if self._on_departure(departure):
                    deadline = time.monotonic() + (_LINGER_SECONDS if self._index == 0 else 0.0)
        self._is_alone.set()
        if deadline is not None and self._departure is not None:
            self._end(self._departure.exit_code)

    def _receive(self, process: int) -> Departure | None:
        """Reads the messages of a process. Returns its departure if it has left or is gone."""
        connection = self._connections[process]
        try:
            content = connection.recv(2**16)
        except OSError:
            content = b""
        if not content:
            self._selector.unregister(connection)
            connection.close()
            del self._connections[process]
            if process in self._finished:
                return None
            return Departure(process, "is gone", 1, is_sudden=True)
        *lines, self._received[process] = (self._received[process] + content).split(b"\n")
        for message in map(_DECODER.decode, lines):
            if not isinstance(message, Done | Departure):
                self._on_message(message)
                continue
            # Either message is a process's last one; its closed connection is no news after that.
            self._finished.add(process)
            if isinstance(message, Departure):
                return message
        return None


def _enable_keepalive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT)
