"""Requests to an engine, and the events and results that answer them."""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence

from lingvo_gshard.wings.inference.options import DecodingOptions

# Why a text ended.
END, LENGTH, STOP, CANCELED = "end", "length", "stop", "canceled"
# Seeds that are drawn are below this: all clients of HTTP can send them.
_SEEDS = 2**31


@dataclasses.dataclass(frozen=True)
class Request:
    """One text to translate or to continue.

    Attributes:
      source: ids of the sentence to translate, the end of text included; empty for a language
        model.
      given: ids before the first token to generate. They begin with the id before all texts, unless
        the start was cut, and go on with a prompt, or a prefix that the text must have.
      options: how to choose tokens. If they draw without a seed, the request draws one.
      streams: whether tokens are reported as they are generated. Not with a beam.
      should_stop: called after each token with all that were generated; True ends the text with
        that token. Not with a beam.
      client: who asks. Clients are served in turn.
      group: number of what the client has sent together. Its groups are served in turn, too.
    """

    source: Sequence[int] = ()
    given: Sequence[int] = ()
    options: DecodingOptions = DecodingOptions()
    streams: bool = False
    should_stop: Callable[[Sequence[int]], bool] | None = None
    client: str = ""
    group: int = 0

    def __post_init__(self) -> None:
        if self.options.draws and self.options.seed is None:
            options = dataclasses.replace(self.options, seed=secrets.randbelow(_SEEDS))
            object.__setattr__(self, "options", options)

    @property
    def seed(self) -> int | None:
        """The seed that draws the texts; None if none is drawn."""
        return self.options.seed if self.options.draws else None


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One generated text.

    Attributes:
      tokens: the new ids, without the id that ended the text.
      log_probabilities: the log-probability of each token, and last of `end` if it is not None.
      score: ranks hypotheses: the log-probability of the text, normalized by beam search.
      reason: why the text ended: END, LENGTH, STOP or CANCELED.
      end: the id that ended the text; None unless the reason is END.
    """

    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    score: float
    reason: str = END
    end: int | None = None


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """Event: tokens were generated.

    Attributes:
      text: number of the text within its request.
      tokens: the new ids; the last may be the end of text.
    """

    text: int
    tokens: tuple[int, ...]
    log_probabilities: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Finished:
    """Event: all texts of the request are complete. No other event follows.

    Attributes:
      hypotheses: the best first, or draws in their order.
    """

    hypotheses: tuple[Hypothesis, ...]


Event = NewTokens | Finished


class Answer:
    """The events that answer one request, in the order of their time."""

    def __init__(
        self, request: Request, texts: int = 1, on_cancel: Callable[[Answer], None] | None = None
    ):
        """Makes an answer without events."""
        self._on_cancel = on_cancel
        self.request = request
        self._texts: list[Sequence[Hypothesis] | None] = [None] * texts
        self._lock = threading.Lock()
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._finished: Finished | None = None
        self._canceled = threading.Event()
        self._listener: Callable[[Event | BaseException], None] | None = None

    def __iter__(self) -> Iterator[Event]:
        """Yields the events. Raises what the engine failed with."""
        while self._finished is None:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Finished):
                self._finished = event
            yield event

    def result(self) -> tuple[Hypothesis, ...]:
        """Waits for the texts and returns them."""
        for _ in self:
            pass
        assert self._finished is not None
        return self._finished.hypotheses

    def listen(self, listener: Callable[[Event | BaseException], None]) -> None:
        """Passes all events, and what the engine fails with, to a function instead of the iterator.

        Args:
          listener: called at once with the events so far, and on the engine's threads with each of
            the others. It must return quickly.
        """
        with self._lock:
            while not self._events.empty():
                listener(self._events.get_nowait())
            self._listener = listener

    def cancel(self) -> None:
        """Asks the engine to stop; the request then finishes with what there is."""
        self._canceled.set()
        if self._on_cancel:
            self._on_cancel(self)

    @property
    def is_canceled(self) -> bool:
        """Whether `cancel` was called."""
        return self._canceled.is_set()

    def put(self, event: Event | BaseException) -> None:
        """Adds an event; called by the engine."""
        with self._lock:
            if self._listener:
                self._listener(event)
            else:
                self._events.put(event)

    def complete(self, text: int, hypotheses: Sequence[Hypothesis]) -> None:
        """Adds the hypotheses of one text; `Finished` follows the last. Called by the engine."""
        with self._lock:
            self._texts[text] = hypotheses
            missing = any(found is None for found in self._texts)
        if not missing:
            self.put(Finished(tuple(h for found in self._texts for h in found or ())))
