"""HttpLoad: many HTTP clients in one thread. Each client sends one request after another.

Clients share the cores with the server that they measure. With one thread for each client, the
clients would take as much time as the server itself.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence

import httptools

_HOST = "127.0.0.1"
# An answer that takes longer is lost.
_PATIENCE = 120.0

# Takes the number of a body, the status of its answer (0 if there was none), the answer's body, and
# the seconds that it took.
Judge = Callable[[int, int, bytes, float], None]


class HttpLoad:
    """Posts bodies in turn from many clients at once, and has every answer judged."""

    def __init__(self, port: int, path: str, bodies: Sequence[bytes], judge: Judge):
        """Prepares to send.

        Args:
          port: of a server on this machine.
          path: of the endpoint.
          bodies: what is sent, in turn.
          judge: called with each answer, in the thread that runs the clients.
        """
        self.port, self._judge = port, judge
        head = f"POST {path} HTTP/1.1\r\nHost: {_HOST}:{port}\r\nContent-Type: application/json\r\n"
        self._messages = [
            f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies
        ]

    def run(self, clients: int, seconds: float = math.inf, requests: float = math.inf) -> float:
        """Runs clients until a time is over or a number of requests are sent.

        Returns:
          The seconds until the last answer.
        """
        self._numbers, self._requests = itertools.count(), requests
        self._started = time.monotonic()
        self._until = self._started + seconds
        asyncio.run(self._run(clients))
        return time.monotonic() - self._started

    def next(self) -> tuple[int, bytes] | None:
        """Returns the number of the next body and the message with it; None at the end."""
        if time.monotonic() >= self._until:
            return None
        number = next(self._numbers)
        if number >= self._requests:
            return None
        number %= len(self._messages)
        return number, self._messages[number]

    def judge(self, number: int, status: int, body: bytes, seconds: float) -> None:
        """Passes an answer on; status 0 stands for none."""
        self._judge(number, status, body, seconds)

    async def _run(self, clients: int) -> None:
        tasks = [asyncio.create_task(self._client()) for _ in range(clients)]
        await asyncio.gather(*tasks)

    async def _client(self) -> None:
        """Runs one client, which connects again when its connection is lost."""
        loop = asyncio.get_running_loop()
        while (message := self.next()) is not None:
            ended = loop.create_future()
            try:
                await loop.create_connection(
                    lambda message=message, ended=ended: _Connection(self, message, ended),
                    _HOST,
                    self.port,
                )
            except OSError:
                self.judge(message[0], 0, b"", 0.0)
                await asyncio.sleep(0.1)
                continue
            await ended


class _Connection(asyncio.Protocol):
    """A connection that sends requests until there are no more, or until it is lost.

    httptools calls the methods named `on_...`.
    """

    def __init__(self, load: HttpLoad, message: tuple[int, bytes], ended: asyncio.Future):
        self._load, self._message, self._ended = load, message, ended
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._is_waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._timer.cancel()
        self._is_waiting = False
        body = b"".join(self._parts)
        self._parts.clear()
        seconds = time.monotonic() - self._began
        self._load.judge(self._message[0], self._parser.get_status_code(), body, seconds)
        following = self._load.next() if self._parser.should_keep_alive() else None
        if following is None:
            self._transport.close()
            return
        self._message = following
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._is_waiting:
            self._load.judge(self._message[0], 0, b"", time.monotonic() - self._began)
        if not self._ended.done():
            self._ended.set_result(None)

    def _send(self) -> None:
        self._began, self._is_waiting = time.monotonic(), True
        # Closing ends in `connection_lost`, which counts the answer as lost.
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self._transport.abort)
        self._transport.write(self._message[1])
