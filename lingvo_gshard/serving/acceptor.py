"""Acceptor: takes connections while there are descriptors for them, and some in reserve."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable

from lingvo_gshard.serving.connection import Connection, Phase

# Connections that wait to be accepted.
_BACKLOG = 2048
# Descriptors for other uses: programs that are read, the compiler's process, redirected output.
_RESERVE = 32
_LEAST = 4
# More descriptors than this are of no use to one process.
_MOST_DESCRIPTORS = 2**16
# At most this many connections are accepted in a row, before the server does other work.
_AT_ONCE = 16
# Seconds until the server accepts again after a failure, and between lines on failures.
_RETRY_SECONDS = 1.0
_SAY_SECONDS = 60.0


def most_connections() -> int:
    """Returns how many connections this process may have; raises its limit of descriptors first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        soft = _MOST_DESCRIPTORS
    return max(soft - len(os.listdir("/proc/self/fd")) - _RESERVE, _LEAST)


class Acceptor:
    """Accepts connections from a listening socket.

    At the largest number of connections, each new connection replaces an old one: the acceptor
    closes the slowest connection that does not wait for an answer. If all connections wait for
    answers, new ones wait in the system's queue.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[Callable[[Connection], None]], Connection],
        most: int,
        say: Callable[[str], None],
    ):
        """Prepares to accept.

        Args:
          listening: the socket.
          make: returns a connection, given what to call when it changes.
          most: the largest number of connections.
          say: shows a line to the person who runs the server.
        """
        self._socket, self._make, self._most, self._say = listening, make, most, say
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._opening: set[asyncio.Task] = set()
        self._is_accepting = self._is_closed = False
        # When a line was said last.
        self._said: dict[str, float] = {}

    def start(self) -> None:
        """Listens, and accepts from now on."""
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accepts no more."""
        self._pause()
        self._is_closed = True

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._connections) >= self._most and not self._make_room():
                self._pause()
                if not self._opening:
                    self._say_once(f"all {self._most:,} connections wait for answers; others wait")
                return
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause()
                self._say_once(f"no connection can be accepted: {error.strerror}")
                self._loop.call_later(_RETRY_SECONDS, self._resume)
                return
            accepted.setblocking(False)
            connection = self._make(self._on_change)
            self._connections.add(connection)
            task = self._loop.create_task(self._open(connection, accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: Connection, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:
            accepted.close()
            self._connections.discard(connection)
        # Now there is one that may give way.
        self._resume()

    def _make_room(self) -> bool:
        """Closes a connection that is not being answered; returns whether there was one."""
        idle = [one for one in self._connections if one.phase is not Phase.ANSWER]
        idle = [one for one in idle if one.transport]
        if not idle:
            return False
        slowest = min(idle, key=lambda one: (one.phase, one.last_received))
        self._connections.discard(slowest)
        self._say_once(f"all {self._most:,} connections are taken; slow ones are closed")
        slowest.evict()
        return True

    def _on_change(self, connection: Connection) -> None:
        if connection.is_over:
            self._connections.discard(connection)
        self._resume()

    def _resume(self) -> None:
        if not self._is_accepting and not self._is_closed:
            self._loop.add_reader(self._socket, self._accept)
            self._is_accepting = True

    def _pause(self) -> None:
        if self._is_accepting:
            self._loop.remove_reader(self._socket)
            self._is_accepting = False

    def _say_once(self, text: str) -> None:
        now = self._loop.time()
        if now - self._said.get(text, -_SAY_SECONDS) >= _SAY_SECONDS:
            self._said[text] = now
            self._say(f"Warning: {text}. Raise the limit with ulimit -n")
