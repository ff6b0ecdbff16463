"""Tells every process of a cluster at once when another one is gone.

Each process keeps the connection that it opened at the rendezvous. The operating system closes it
when the process ends, however it ends, and TCP keepalive finds a machine that vanished. Process 0
then tells the others. Without this, a survivor would wait in a collective that never ends until
jax's heartbeats abort it.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from lingvo_gshard.runtime.cluster.rendezvous import send_line
from lingvo_gshard.runtime.cluster.roll_call import Hang, StacksWanted
from lingvo_gshard.training.observers.snapshot import Snapshot

# A machine that does not answer counts as gone after about 10 + 4 * 5 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_LINGER_SECONDS = 10.0


class Done(msgspec.Struct, tag="done"):
    """The message of a process that ends in good order."""


class Departure(msgspec.Struct, frozen=True, tag="left"):
    """The message that a process leaves the others before the program's end.

    Attributes:
      process: number of the process.
      reason: how it left, in words that follow its number, such as "is gone".
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
          index: number of this process.
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
        """Tells the others that a process, usually this one, leaves them.

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
        if deadline is not None:
            self._end(self._departure.exit_code)

    def _receive(self, process: int) -> Departure | None:
        """Reads what a process sent; returns the departure that it announces or that it shows."""
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
