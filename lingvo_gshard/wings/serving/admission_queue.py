"""AdmissionQueue: passes requests from the event loop to the engine, within a capacity."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from starlette.types import Receive

from lingvo_gshard.wings.inference.decoding.state import SearchKind
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.programs.executables import CompilerStuckError, ProgramKey
from lingvo_gshard.wings.inference.requests import (
    Answer,
    Event,
    Finished,
    Hypothesis,
    NewTokens,
    Request,
)
from lingvo_gshard.wings.inference.routed_experts import (
    RoutedExperts,
    routed_experts,
    routed_experts_program,
)
from lingvo_gshard.wings.serving.errors import ClientGoneError, RequestError
from lingvo_gshard.wings.serving.metrics import Metrics
from lingvo_gshard.wings.serving.model import ServedModel


def routing_program(model: ServedModel, request: Request, hypothesis: Hypothesis) -> ProgramKey:
    """Returns the program that `describe_routing` runs."""
    count = len(request.given) + len(hypothesis.tokens)
    return routed_experts_program(model.engine.facts, count, len(request.source))


def describe_routing(model: ServedModel, request: Request, hypothesis: Hypothesis) -> dict:
    """Returns as a JSON value which experts the tokens of a text were routed to.

    Returns:
      `layers` with path, stack and number of experts, and lists of tokens, each with `text` and
      `experts`: for each layer of the token's stack a list of [expert, gate]. `source` has the
      source's tokens, `given` the tokens given before the text, and `tokens` the new tokens.
    """
    given = len(request.given)
    layers = routed_experts(model.engine, [*request.given, *hypothesis.tokens], request.source)
    encoder = [layer for layer in layers if layer.reads_source]
    decoder = [layer for layer in layers if not layer.reads_source]
    source, new = model.source_vocabulary, model.vocabulary
    return {
        "layers": [
            {
                "path": layer.path,
                "stack": "encoder" if layer.reads_source else "decoder",
                "num_experts": layer.num_experts,
            }
            for layer in layers
        ],
        "source": _tokens([source.piece(i) for i in request.source], encoder) if source else [],
        "given": _tokens([new.piece(i) for i in request.given], decoder),
        "tokens": _tokens([new.piece(i) for i in hypothesis.tokens], decoder, given),
    }


def _tokens(pieces: Sequence[str], layers: Sequence[RoutedExperts], first: int = 0) -> list[dict]:
    """Returns tokens with their experts; `first` is the position of the first one."""
    return [
        {"text": piece, "experts": [layer.experts[first + index] for layer in layers]}
        for index, piece in enumerate(pieces)
    ]


# When the server is full, the header Retry-After tells clients to wait for this many seconds.
_RETRY_AFTER = 1


class AdmissionQueue:
    """Takes requests while there is room, and counts the texts under way.

    A text of a canceled request counts until the engine has dropped it.
    """

    def __init__(self, engine: Engine, capacity: int, kinds: int, metrics: Metrics):
        """Prepares to take so many texts, of so many kinds of search kept in memory."""
        self.under_way = 0
        self._most_kinds = kinds
        # The texts under way of each kind of search; the kind used last is at the end.
        self._kinds: OrderedDict[SearchKind, int] = OrderedDict()
        self._groups = itertools.count()
        self._engine, self._capacity, self._metrics = engine, capacity, metrics

    def submit(self, requests: Sequence[Request], receive: Receive, client: str = "") -> Answers:
        """Returns the answers to the texts of one HTTP request, to be used as a context manager.

        Raises:
          RequestError: there is no room now, or not even in an empty queue.
          UserError: a request does not fit the model.
        """
        counts = [request.options.texts for request in requests]
        self.check_size(sum(counts))
        if self.under_way + sum(counts) > self._capacity:
            raise RequestError(
                503,
                f"the queue is full: {self.under_way:,} texts are under way",
                code="queue_full",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )
        kinds = [request.options.kind for request in requests]
        self._make_room_for(kinds)
        loop, group = asyncio.get_running_loop(), next(self._groups)
        asked = [dataclasses.replace(one, client=client, group=group) for one in requests]
        answers = Answers(self._engine.submit_all(asked), receive)
        self.under_way += sum(counts)
        for kind in kinds:
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
            self._kinds.move_to_end(kind)

        def take(index: int, event: Event | BaseException) -> None:
            if not isinstance(event, NewTokens):
                self.under_way -= counts[index]
                self._kinds[kinds[index]] -= 1
            if isinstance(event, Finished):
                tokens = sum(len(found.log_probabilities) for found in event.hypotheses)
                self._metrics.tokens.inc(tokens)
            answers.put(index, event)

        for index, answer in enumerate(answers.answers):

            def listen(event: Event | BaseException, index: int = index) -> None:
                # The loop is closed when the server has stopped waiting.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(take, index, event)

            answer.listen(listen)
        return answers

    def check_size(self, texts: int) -> None:
        """Raises RequestError if one HTTP request has more texts than the queue ever takes."""
        if texts > self._capacity:
            raise RequestError(
                413, f"the request has {texts:,} texts; this server takes {self._capacity:,}"
            )

    def _make_room_for(self, kinds: Iterable[SearchKind]) -> None:
        """Has the engine forget unused kinds of search. Raises RequestError if all are in use."""
        new = set(kinds) - set(self._kinds)
        unused = [kind for kind, texts in self._kinds.items() if not texts and kind not in kinds]
        for kind in unused[: max(len(self._kinds) + len(new) - self._most_kinds, 0)]:
            del self._kinds[kind]
            self._engine.executables.forget(kind)
        # Kinds of search that need no compiler are always accepted.
        rare = [kind for kind in new if not self._engine.executables.knows(kind)]
        if rare and len(self._kinds) + len(rare) > self._most_kinds:
            raise RequestError(
                503,
                f"{len(self._kinds)} kinds of search are in use, the limit of this server: beam "
                "sizes, drawing, restricted tokens and penalties. Use a common one, or try later",
                code="too_many_kinds",
                headers={"Retry-After": str(_RETRY_AFTER)},
            )


class Answers:
    """The answers to the texts of one HTTP request. Leaving the context cancels the rest."""

    def __init__(self, answers: Sequence[Answer], receive: Receive):
        self.answers = answers
        self._receive = receive
        # An error is the end of the events.
        self._events: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue()
        self._watcher: asyncio.Task | None = None

    async def __aenter__(self) -> Answers:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watcher:
            self._watcher.cancel()
        # Has no effect on those that are complete.
        for answer in self.answers:
            answer.cancel()

    def put(self, index: int, event: Event | BaseException) -> None:
        """Adds an event of the text with a number; called by the queue."""
        self._events.put_nowait((index, event))

    async def next(self) -> tuple[int, Event]:
        """Returns the next event with the number of its text.

        Raises:
          ClientGoneError: the client has closed its connection.
          RequestError: the compiler is stuck, and the request needs it.
          RuntimeError: the engine failed.
        """
        index, event = await self._events.get()
        if not isinstance(event, BaseException):
            return index, event
        if isinstance(event, ClientGoneError):
            raise event
        if isinstance(event, CompilerStuckError):
            raise RequestError(503, f"{event}; try later", code="compiler_stuck")
        raise RuntimeError("the engine failed") from event

    async def results(self) -> list[tuple[Hypothesis, ...]]:
        """Waits for all texts and returns their hypotheses. Raises what `next` raises."""
        found: dict[int, tuple[Hypothesis, ...]] = {}
        while len(found) < len(self.answers):
            index, event = await self.next()
            if isinstance(event, Finished):
                found[index] = event.hypotheses
        return [found[index] for index in range(len(self.answers))]

    async def _watch(self) -> None:
        """Adds an event when the client closes its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.put(0, ClientGoneError())
