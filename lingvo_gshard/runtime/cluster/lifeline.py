"""The lifeline: while a cluster runs, every process learns at once that another one is gone.

Each process keeps the connection that it opened for the roll call. The system closes it when the
process ends in whatever way, and the kernel's keepalive finds a machine that vanished; process 0
tells the others. Without it a survivor waits for a collective that never ends, until jax's
heartbeats abort it.
"""

from __future__ import annotations

import dataclasses
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable

from lingvo_gshard.runtime.cluster.roll_call import send_line

# A machine that does not answer is gone after about 10 + 4 * 5 seconds.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_LINGER_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Loss:
    """That a process has left the others: which, how, and the exit code that fits.

    sudden: it could not say so itself.
    """

    process: int
    how: str
    code: int
    sudden: bool


class Lifeline:
    """Watches the other processes in a thread of its own.

    on_loss: called in that thread with the first loss; True means that this process shall end, by
        `end` with the exit code, once the others have heard of it.
    """

    def __init__(
        self,
        index: int,
        connections: dict[int, socket.socket],
        on_loss: Callable[[Loss], bool],
        end: Callable[[int], None],
    ):
        self._index = index
        self._on_loss = on_loss
        self._end = end
        self._connections = dict(connections)
        self._done: set[int] = set()
        self._received = dict.fromkeys(connections, b"")
        self._loss: Loss | None = None
        self._alone = threading.Event()
        self._selector = selectors.DefaultSelector()
        for process, connection in connections.items():
            _keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ, process)
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def say_done(self) -> None:
        """Tells the others that this process ends in good order."""
        self._tell({"kind": "done"})

    def say_left(self, how: str, code: int) -> None:
        """Tells the others that this process leaves them, how, and what their exit code should be.

        Process 0 waits until they have ended, since jax aborts those that lose it.
        """
        self._tell({"kind": "left", "process": self._index, "how": how, "code": code})
        if self._index == 0:
            self._alone.wait(_LINGER_SECONDS)

    def _tell(self, message: dict, but: int | None = None) -> None:
        for process, connection in list(self._connections.items()):
            if process != but:
                send_line(connection, message)

    def _watch(self) -> None:
        deadline = None
        while self._connections and (deadline is None or time.monotonic() < deadline):
            for key, _ in self._selector.select(timeout=0.2):
                loss = self._receive(key.data)
                if loss is None or self._loss is not None:
                    continue
                self._loss = loss
                if self._index == 0:
                    self._tell(_as_message(loss), but=loss.process)
                if self._on_loss(loss):
                    deadline = time.monotonic() + (_LINGER_SECONDS if self._index == 0 else 0.0)
        self._alone.set()
        if deadline is not None:
            self._end(self._loss.code)

    def _receive(self, process: int) -> Loss | None:
        """Reads what a process sent; returns the loss that it tells or shows."""
        connection = self._connections[process]
        try:
            content = connection.recv(2**16)
        except OSError:
            content = b""
        if not content:
            self._selector.unregister(connection)
            connection.close()
            del self._connections[process]
            return None if process in self._done else Loss(process, "is gone", 1, sudden=True)
        *lines, self._received[process] = (self._received[process] + content).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            # Whoever has said how it ends has said all.
            self._done.add(process)
            if message["kind"] == "left":
                names = ("process", "how", "code", "sudden")
                return Loss(**{name: message.get(name, False) for name in names})
        return None


def _as_message(loss: Loss) -> dict:
    return {"kind": "left", **dataclasses.asdict(loss)}


def _keep_alive(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
