"""Accepts connections and runs the web server until a signal; requests under way then finish."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.connection import Connection, ConnectionLimits, Phase
from lingvo_gshard.wings.serving.metrics import Metrics
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.service import Service

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
        """Prepares to accept `most` connections, which `make` returns, given their `on_change`."""
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


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A new model in the directory is noticed after so many seconds at most.
_WATCH_SECONDS = 30.0
# Seconds for requests to tell their clients that they are cut off.
_CUT_OFF_SECONDS = 1.0
# Seconds between checks whether all requests are answered.
_POLL_SECONDS = 0.05


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address and does not listen yet. Port 0 is any free one.

    Raises:
      UserError: the address is unknown or taken.
    """
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        is_taken = error.errno == errno.EADDRINUSE
        raise UserError(
            f"`host={host}` `port={port}`: cannot listen there: {error.strerror or error}"
            + "; `port=0` chooses a free one" * is_taken
        ) from None
    return opened


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options for a server's connections.

    Attributes:
      drain_seconds: how long requests under way may take after a signal to stop.
      origins: who may use it from a browser; None for all.
      most_connections: the largest number of them; None for as many as the process may have.
    """

    drain_seconds: float = 30.0
    origins: Origins | None = None
    limits: ConnectionLimits = ConnectionLimits()
    most_connections: int | None = None


def run(
    service: Service,
    listening: socket.socket,
    options: ServerOptions,
    say: Callable[[str], None],
    on_ready: Callable[[], None],
) -> int:
    """Serves until a signal, then answers requests; returns how many were cut off."""
    server = Server(service, options, say, on_ready)
    asyncio.run(server.serve(sockets=[listening]))
    return server.cut_off


class AppServer(uvicorn.Server):
    """A server that a signal stops without ending the process. `cut_off` counts lost requests."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        options: ServerOptions,
        say: Callable[[str], None],
        on_ready: Callable[[], None] = lambda: None,
    ):
        """Prepares to serve. `say` shows a line; `on_ready` is called when the server listens."""
        super().__init__(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                server_header=False,
                lifespan="off",
                loop="asyncio",
                ws="none",
            )
        )
        self.cut_off = 0
        self._refused, self._options, self._say = metrics.refused, options, say
        self._on_ready = on_ready
        self._acceptors: list[Acceptor] = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stops at a signal. A second signal stops without waiting."""
        loop = asyncio.get_running_loop()
        # Python delivers signals to the main thread only.
        is_main = threading.current_thread() is threading.main_thread()
        for number in _SIGNALS if is_main else ():
            loop.add_signal_handler(number, self._on_signal, number)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and then says so."""
        most = self._options.most_connections or most_connections()
        for one in sockets or []:
            self._acceptors.append(Acceptor(one, self._connection, most, self._say))
            self._acceptors[-1].start()
        self.started = True
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, waits for requests under way, and cuts off the others."""
        for acceptor in self._acceptors:
            acceptor.close()
        for one in sockets or []:
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        tasks, loop = self.server_state.tasks, asyncio.get_running_loop()
        end = loop.time() + self._options.drain_seconds
        while tasks and not self.force_exit and loop.time() < end:
            await asyncio.sleep(_POLL_SECONDS)
        self.cut_off = len(tasks)
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.cut_off()
        # Connections learn of their end in the next turn of the loop.
        await asyncio.sleep(0)
        left = set(tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CUT_OFF_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.close()
        await asyncio.sleep(0)

    def on_stop(self) -> None:
        """Is called at the signal to stop."""

    def _connection(self, on_change: Callable[[Connection], None]) -> Connection:
        return Connection(
            self._options.limits,
            self.config,
            self.server_state,
            on_change,
            lambda status: self._refused.labels(str(status)).inc(),
        )

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.should_exit:
            self._say(f"{name}: stopping without waiting")
            self.force_exit = True
            return
        self.should_exit = True
        self.on_stop()
        count = len(self.server_state.tasks)
        self._say(f"{name}: accepting no more; {count} requests under way. Repeat to stop at once")


class Server(AppServer):
    """The server of a model."""

    def __init__(
        self,
        service: Service,
        options: ServerOptions,
        say: Callable[[str], None],
        on_ready: Callable[[], None] = lambda: None,
    ):
        app = make_app(service, options.origins)
        super().__init__(app, service.metrics, options, say, on_ready)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stops at a signal, and has a replaced or removed directory logged meanwhile."""
        watching = asyncio.get_running_loop().create_task(self._watch_directory())
        try:
            with super().capture_signals():
                yield
        finally:
            watching.cancel()

    def on_stop(self) -> None:
        """Has the endpoints say that the server stops."""
        self._service.is_draining = True

    async def _watch_directory(self) -> None:
        """Has a replaced or removed directory logged."""
        while self._service.directory:
            await asyncio.to_thread(self._service.directory.state)
            await asyncio.sleep(_WATCH_SECONDS)
