"""Engine: answers requests with continuous batching, on one or several threads.

A worker is a thread with decode batches of its own, one for each kind of search under way. When
texts of a batch end, waiting requests take their places. XLA for CPU computes the small products of
a decoding step on one core, so that one worker for each core decodes fastest. Workers share the
weights and the compiled programs.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Sequence

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.inference.decoding.state import SearchKind, StateShape
from lingvo_gshard.inference.engine import shapes
from lingvo_gshard.inference.engine.shapes import EngineOptions
from lingvo_gshard.inference.engine.waiting import BeamText, DecodedText, SampledText, WaitingTexts
from lingvo_gshard.inference.engine.worker import Worker
from lingvo_gshard.inference.options import DecodingOptions
from lingvo_gshard.inference.programs.executables import Executables
from lingvo_gshard.inference.requests import Answer, Request
from lingvo_gshard.tasks.model_facts import ModelFacts, usual_tokens


class Engine:
    """Answers requests with one model.

    Requests may come from any thread, and have different options. Requests with the same kind of
    search are decoded together. The answer to a request does not depend on other requests, up to
    the rounding of floating-point sums.

    Attributes:
      facts: what the host knows of the model.
      executables: the model's programs.
      weights: the decoding weights.
    """

    def __init__(
        self,
        facts: ModelFacts,
        executables: Executables,
        weights: Sequence[jax.Array],
        options: EngineOptions | None = None,
    ):
        """Starts no thread before the first request.

        Args:
          facts: what the host knows of the model.
          executables: the model's programs.
          weights: the decoding weights, outputs of the PREPARE program.
          options: how to use the machine.
        """
        self.facts, self.executables = facts, executables
        self.weights, self._options = list(weights), options or EngineOptions()
        self._waiting = WaitingTexts()
        executables.listen(self._waiting.wake)
        self._workers: list[Worker] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: Request) -> Answer:
        """Returns the answer to a request, which is computed in the background.

        Raises:
          UserError: the request does not fit the model.
        """
        (answer,) = self.submit_all([request])
        return answer

    def submit_all(self, requests: Sequence[Request]) -> list[Answer]:
        """Returns the answers to requests, which are taken up in order."""
        answers, rows = [], []
        for request in requests:
            answer = Answer(request, request.options.texts, self._waiting.cancel)
            answers.append(answer)
            rows += self._rows(answer)
        self._start_workers()
        self._waiting.put(rows)
        return answers

    def warm_up(self, options: DecodingOptions, lengths: Sequence[int]) -> None:
        """Compiles the programs for single texts and for full batches; no request waits for them.

        Args:
          options: how tokens will be chosen.
          lengths: tokens of sources and texts.
        """
        kind, parts = options.kind, self.executables.parts
        for count in (1, self._options.most_texts(kind.beam)):
            for wanted in lengths:
                length = shapes.fitting(shapes.LENGTHS, wanted)
                source = min(length, self.facts.most_source)
                shape = StateShape(parts * shapes.fitting(shapes.ROWS, count), length, source)
                for key in shapes.program_keys(kind, shape, parts):
                    self.executables.get(key)

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a place in a batch."""
        return self._waiting.total

    def knows(self, kind: SearchKind) -> bool:
        """Returns whether texts of a kind of search need no compiler, except for rare lengths."""
        return self.executables.knows(kind)

    def forget(self, kind: SearchKind) -> None:
        """Frees the memory that a kind of search takes while no texts are decoded with it."""
        self.executables.forget(kind)

    def stuck(self, seconds: float) -> list[str]:
        """Returns which threads decode for longer than a time, or have ended, in words.

        Args:
          seconds: the longest time that a call of a program may take.
        """
        now, found = time.monotonic(), []
        for number, worker in enumerate(self._workers, start=1):
            if worker.has_died:
                found.append(f"worker {number} has ended")
            elif worker.busy_since and now - worker.busy_since > seconds:
                found.append(f"worker {number} has decoded for {now - worker.busy_since:.0f} s")
        return found

    def stuck_programs(self, seconds: float) -> list[str]:
        """Returns which programs have been compiled for longer than a time, in words."""
        now = time.monotonic()
        return [
            f"{key} has been compiled for {now - since:.0f} s"
            for key, since in self.executables.making().items()
            if now - since > seconds
        ]

    def close(self) -> None:
        """Stops when all requests are answered; then releases the threads."""
        self._waiting.close()
        for worker in self._workers:
            worker.join()
        self.executables.stop()

    def most_tokens(self, request: Request) -> int:
        """Returns the largest number of new tokens that a text of a request may have.

        Raises:
          UserError: the request leaves no room for any, or has not what the model needs.
        """
        facts, source = self.facts, len(request.source)
        beam_size = request.options.beam_size
        most_beam = facts.vocabulary_size - len(facts.end_ids)
        if beam_size > most_beam:
            raise UserError(
                f"beam_size is {beam_size}; 1 to {most_beam:,} was expected, no more than the "
                "vocabulary has tokens besides the end"
            )
        self._check_ids(request.options)
        if facts.has_source != bool(source):
            wanted = "a source" if facts.has_source else "no source"
            raise UserError(f"the model takes {wanted}, and the request has {source} tokens of it")
        if source > facts.most_source:
            raise UserError(
                f"the source has {source} tokens; the model takes {facts.most_source} at most"
            )
        room = facts.most_positions - len(request.given) + 1
        if not request.given or room < 1:
            raise UserError(
                f"the request gives {len(request.given)} tokens; 1 to {facts.most_positions} were "
                "expected, that before all texts counted"
            )
        wanted = request.options.most_tokens or (usual_tokens(source) if source else room)
        return min(wanted, room)

    def _check_ids(self, options: DecodingOptions) -> None:
        """Raises ValueError if the vocabulary lacks an id, or if no token is left to choose."""
        size = self.facts.vocabulary_size
        for name in ("allowed_tokens", "forbidden_tokens"):
            for index in getattr(options, name):
                if not 0 <= index < size:
                    raise UserError(f"{name} has {index}; ids from 0 to {size - 1:,} were expected")
        if not options.allowed_tokens and not options.forbidden_tokens:
            return
        ends, forbidden = set(self.facts.end_ids), set(options.forbidden_tokens)
        left = set(options.allowed_tokens or range(size)) - ends - forbidden
        if not left and not ends - forbidden:
            raise UserError("allowed_tokens and forbidden_tokens leave no token")
        if not left and options.least_tokens > 1:
            raise UserError(
                "allowed_tokens and forbidden_tokens leave no token besides the end, and "
                f"least_tokens is {options.least_tokens}"
            )

    def _rows(self, answer: Answer) -> list[DecodedText]:
        """Returns the rows that answer a request: one for a search, or one for each draw."""
        request, options = answer.request, answer.request.options
        limit = self.most_tokens(request)
        if options.beam_size > 1:
            if request.streams or request.should_stop:
                raise UserError("beam search cannot stream or stop early; set beam_size=1")
            return [BeamText(answer, 0, limit, self.facts.end_ids)]
        ends = self.facts.end_ids
        return [SampledText(answer, text, limit, ends) for text in range(options.texts)]

    def _start_workers(self) -> None:
        if self._workers:
            return
        count = self._options.workers
        if not count:
            is_cpu = self.executables.platform == "cpu" and self.executables.device_count == 1
            count = len(os.sched_getaffinity(0)) if is_cpu else 1
        self._waiting.workers = count
        self._workers = [
            Worker(self.facts, self.executables, self.weights, self._waiting, self._options)
            for _ in range(count)
        ]
        # A thread must not be inside XLA when Python ends, and threads outlive an engine that
        # nobody holds. Functions run in reverse order: this one before jax's own, there by now.
        atexit.register(_stop, self._waiting, self._workers, self.executables)


def _stop(waiting: WaitingTexts, workers: Sequence[Worker], executables: Executables) -> None:
    """Stops after the current step of each thread. Requests under way get no answer."""
    waiting.stop()
    for worker in workers:
        worker.join()
    executables.stop()
