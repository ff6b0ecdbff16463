"""Runs the web server until a signal stops it, and lets requests under way finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from lingvo_gshard.serving.app import make_app
from lingvo_gshard.serving.service import Service

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds between looks at the directory of the model.
_WATCH_SECONDS = 30.0
# Connections that wait to be accepted.
_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket with an address, which does not listen yet; ValueError if it is taken.

    Args:
      host: name or address of an interface.
      port: the port; 0 chooses a free one.
    """
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise ValueError(
            f"--host={host} --port={port}: cannot listen there: {error.strerror or error}"
        ) from None
    return opened


def run(
    service: Service, listening: socket.socket, drain_seconds: float, say: Callable[[str], None]
) -> int:
    """Serves until a signal arrives, and then until all requests are answered.

    Args:
      service: what to serve.
      listening: the socket.
      drain_seconds: how long requests under way may take after the signal.
      say: shows a line to the person who runs the server.

    Returns:
      The number of requests that were cut off.
    """
    server = Server(service, drain_seconds, say)
    asyncio.run(server.serve(sockets=[listening]))
    return server.cut_off


class Server(uvicorn.Server):
    """A server that a signal stops without ending the process by that signal."""

    def __init__(self, service: Service, drain_seconds: float, say: Callable[[str], None]):
        # uvicorn takes whole seconds.
        super().__init__(
            uvicorn.Config(
                make_app(service),
                log_level="error",
                access_log=False,
                server_header=False,
                lifespan="off",
                loop="asyncio",
                ws="none",
                backlog=_BACKLOG,
                timeout_graceful_shutdown=max(1, round(drain_seconds)),
            )
        )
        self.cut_off = 0
        self._service, self._say = service, say

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stops at a signal. A second one stops without waiting."""
        loop = asyncio.get_running_loop()
        # Python delivers signals to the main thread only.
        is_main = threading.current_thread() is threading.main_thread()
        for number in _SIGNALS if is_main else ():
            loop.add_signal_handler(number, self._on_signal, number)
        watching = loop.create_task(self._watch_directory())
        try:
            yield
        finally:
            watching.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting, waits for requests under way, and counts those that it cuts off."""
        await super().shutdown(sockets)
        self.cut_off = len(self.server_state.tasks)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.should_exit:
            self._say(f"{name}: stopping without waiting")
            self.force_exit = True
            return
        self.should_exit = self._service.is_draining = True
        count = len(self.server_state.tasks)
        self._say(f"{name}: accepting no more; {count} requests under way. Repeat to stop at once")

    async def _watch_directory(self) -> None:
        """Has a replaced or removed directory logged."""
        while self._service.directory:
            await asyncio.to_thread(self._service.directory.state)
            await asyncio.sleep(_WATCH_SECONDS)
