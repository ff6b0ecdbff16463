"""Honest clients: ask, wait, and compare what they get with what the translator says offline."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Callable

HOST = "127.0.0.1"
# A client that is not answered tries again until this much later.
PATIENCE = 90.0
_RETRY_SECONDS = 1.0
# Refusals after which a client may try again: the server stops, or is full.
_AGAIN = ("stopped", "queue_full", "slow")


@dataclasses.dataclass(frozen=True)
class Question:
    """A body, and the texts that answer it."""

    body: bytes
    texts: tuple[str, ...]


@dataclasses.dataclass
class Tally:
    """What honest clients have seen.

    Attributes:
      seconds: from the first try to the answer, of each question.
      calm: of those that were asked while the server did not restart.
      retries: tries that ended without an answer while the server restarted, or was full.
      lost: questions without an answer, and answers that are errors, in words.
      wrong: answers that differ from the offline translation, in words.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    calm: list[float] = dataclasses.field(default_factory=list)
    retries: int = 0
    lost: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)


class Server:
    """Where the server is now.

    Attributes:
      port: its port.
      restarts_until: no answer is no fault before this time of time.monotonic.
    """

    def __init__(self, port: int):
        self.port, self.restarts_until = port, 0.0

    @property
    def is_restarting(self) -> bool:
        return time.monotonic() < self.restarts_until


async def exchange(port: int, message: bytes) -> tuple[int, bytes]:
    """Returns the status and the body of an answer on a connection of its own."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(message)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read()
    finally:
        writer.close()
    return int(head.split()[1]), body


def message(port: int, body: bytes, path: str = "/v1/translate") -> bytes:
    """Returns a request that ends its connection."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def honest(
    server: Server,
    choose: Callable[[random.Random], Question],
    tally: Tally,
    chance: random.Random,
    until: float,
    pause: float,
) -> None:
    """Asks one question after the other until a time.

    Args:
      server: the server.
      choose: returns the next question.
      tally: counts.
      chance: decides.
      until: asks no more, in the time of time.monotonic.
      pause: mean seconds between an answer and the next question.
    """
    await asyncio.sleep(chance.random() * pause)
    while time.monotonic() < until:
        await _ask(server, choose(chance), tally)
        await asyncio.sleep(chance.expovariate(1 / pause))


async def _ask(server: Server, question: Question, tally: Tally) -> None:
    began, was_calm = time.monotonic(), not server.is_restarting
    while True:
        problem, may_retry = "", server.is_restarting
        try:
            async with asyncio.timeout(PATIENCE):
                status, body = await exchange(server.port, message(server.port, question.body))
        except (OSError, EOFError, TimeoutError) as error:
            problem = f"no answer: {error!r}"
        else:
            if status == 200:
                break
            problem = f"status {status}: {body[:200]!r}"
            may_retry = status == 503 and json.loads(body)["error"]["code"] in _AGAIN
        may_retry |= server.is_restarting
        if not may_retry or time.monotonic() - began > PATIENCE:
            tally.lost.append(problem)
            return
        tally.retries += 1
        await asyncio.sleep(_RETRY_SECONDS)
    took = time.monotonic() - began
    tally.seconds.append(took)
    if was_calm and not server.is_restarting:
        tally.calm.append(took)
    found = tuple(one["text"] for one in json.loads(body)["translations"])
    if found != question.texts:
        tally.wrong.append(f"{found} in place of {question.texts}")
