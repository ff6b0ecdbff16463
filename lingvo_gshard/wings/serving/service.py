"""Service: what all endpoints share, which are the model, the queue, the limits and the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import anyio.to_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.inference import requests as inference
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.programs.executables import ProgramKey
from lingvo_gshard.wings.inference.scoring import TokenScores, score, scoring_program
from lingvo_gshard.wings.serving.admission_queue import (
    AdmissionQueue,
    Answers,
    describe_routing,
    routing_program,
)
from lingvo_gshard.wings.serving.bodies import SearchBody, read_bytes
from lingvo_gshard.wings.serving.errors import UNPROCESSABLE, RequestError, unprocessable
from lingvo_gshard.wings.serving.limits import Limits
from lingvo_gshard.wings.serving.metrics import Metrics
from lingvo_gshard.wings.serving.model import DirectoryWatch, ServedModel

_Result = TypeVar("_Result")

# Bodies with more bytes are tokenized on a thread, so that others do not wait.
_FEW_BYTES = 4096
# Seconds between checks whether a program is loaded.
_POLL_SECONDS = 0.05


class Service:
    """One model being served, with its limits, metrics and queue."""

    def __init__(
        self,
        model: ServedModel,
        limits: Limits | None = None,
        token: str = "",
        directory: DirectoryWatch | None = None,
    ):
        """Prepares to serve requests that bring `token`, if it is not empty, as a bearer token."""
        self.model, self.limits, self.directory = model, limits or Limits(), directory
        self.metrics = Metrics(lambda: model.engine.waiting)
        self.queue = AdmissionQueue(
            model.engine, self.limits.queue_size, self.limits.most_kinds, self.metrics
        )
        self.is_draining = False
        self._token = token.encode()
        self._visiting = asyncio.Lock()

    @property
    def has_token(self) -> bool:
        """Whether requests need a bearer token."""
        return bool(self._token)

    def check_token(self, request: Request) -> None:
        """Raises RequestError with 401 if a request lacks the bearer token."""
        if not self._token:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # Headers are decoded as Latin-1, whatever their bytes are.
        is_equal = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        if kind.lower() != "bearer" or not is_equal:
            said = "is wrong" if given else "is missing"
            raise RequestError(
                401,
                f"the bearer token {said}; send the header Authorization: Bearer TOKEN",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_task(self, task: str, path: str) -> None:
        """Raises RequestError with 404 if the model does something else than an endpoint."""
        if self.model.task != task:
            own = {"translation": "/v1/translate", "language_model": "/v1/generate"}
            raise RequestError(
                404,
                f"{self.model.name} is a {self.model.task.replace('_', ' ')} model, for which "
                f"{path} does nothing; use {own[self.model.task]}",
            )

    def checked_search(self, body: SearchBody) -> DecodingOptions:
        """Returns the options of a request. Raises RequestError if one is wrong or too large."""
        options = body.options()
        for name in ("beam_size", "best"):
            if getattr(options, name) > self.limits.most_beam_size:
                raise unprocessable(
                    name,
                    f"{name} is {getattr(options, name)}; at most {self.limits.most_beam_size}, "
                    "the limit of this server, was expected",
                )
        self._check_stops(options.stop)
        size = self.model.engine.facts.vocabulary_size
        for name in ("allowed_tokens", "forbidden_tokens"):
            for index, token in enumerate(getattr(options, name)):
                if token >= size:
                    field = f"{name}[{index}]"
                    raise unprocessable(field, f"{field} is {token}; 0 to {size - 1} was expected")
        return options

    def _check_stops(self, stops: Sequence[str]) -> None:
        count, longest = len(stops), max(map(len, stops), default=0)
        most, characters = self.limits.stops, self.limits.stop_characters
        if count > most:
            raise unprocessable("stop", f"stop has {count:,} texts; at most {most} were expected")
        if longest > characters:
            said = f"stop has a text of {longest:,} characters; at most {characters} were expected"
            raise unprocessable("stop", said)

    def deadline(self, seconds: float | None) -> float:
        """Returns the event loop's time to answer by. Raises RequestError if it is too late."""
        most = self.limits.timeout
        if seconds is not None and seconds > most:
            raise unprocessable(
                "timeout",
                f"timeout is {seconds:g}; at most {most:g} seconds, the limit of this server, was "
                "expected",
            )
        return asyncio.get_running_loop().time() + (seconds or most)

    @contextlib.asynccontextmanager
    async def until(self, deadline: float) -> AsyncIterator[None]:
        """Raises RequestError with 504 if what happens inside takes longer than the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            raise RequestError(504, "the time for this request is over", code="timeout") from None

    def submit(
        self, requests: Sequence[inference.Request], request: Request, status: int = UNPROCESSABLE
    ) -> Answers:
        """Returns the answers to texts. Raises RequestError with `status` if one does not fit."""
        try:
            client = request.client.host if request.client else ""
            return self.queue.submit(requests, request.receive, client)
        except UserError as error:
            raise RequestError(status, str(error)) from None

    async def read(self, request: Request) -> bytes:
        """Returns the body of a request; see `bodies.read_bytes`."""
        return await read_bytes(request, self.limits.most_body_bytes, self.limits.timeout)

    async def prepare(
        self, prepare: Callable[[], _Result], deadline: float, size: int | None = None
    ) -> _Result:
        """Returns what a function makes of a body, on a thread if that takes a while.

        Args:
          prepare: reads the body's texts as tokens.
          deadline: when to give up, in the event loop's time. The thread then ends later.
          size: the body's bytes; None if its size does not tell how long it takes.

        Raises:
          RequestError: the time is over, or what the function raises.
        """
        if size is not None and size <= _FEW_BYTES:
            return prepare()
        async with self.until(deadline):
            return await anyio.to_thread.run_sync(prepare, abandon_on_cancel=True)

    async def routing(self, asked: inference.Request, found: inference.Hypothesis) -> dict:
        """Returns which experts the tokens of a text were routed to; see `describe_routing`.

        Another thread compiles the program. The event loop goes on meanwhile.
        """
        await self._program(routing_program(self.model, asked, found))
        async with self._visiting:
            return await run_in_threadpool(describe_routing, self.model, asked, found)

    async def score(self, tokens: Sequence[int]) -> TokenScores:
        """Returns how likely each token of a text is; see `scoring.score`.

        Another thread compiles the program. The event loop goes on meanwhile.
        """
        engine = self.model.engine
        await self._program(scoring_program(engine.facts, len(tokens)))
        async with self._visiting:
            return await run_in_threadpool(score, engine, tokens)

    async def _program(self, key: ProgramKey) -> None:
        """Waits until a program is loaded. Raises what compiling it failed with."""
        executables, began = self.model.engine.executables, time.monotonic()
        while not executables.is_loaded(key):
            if error := executables.failure([key], began):
                raise error
            executables.want([key])
            await asyncio.sleep(_POLL_SECONDS)
