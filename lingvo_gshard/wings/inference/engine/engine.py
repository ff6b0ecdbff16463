"""Engine: answers requests with continuous batching, on one or several threads.

A worker is a thread with decode batches of its own, one for each kind of search under way. When
texts of a batch end, waiting requests take their places. Workers share weights and programs.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Sequence

from lingvo_gshard.core import UserError, jax
from lingvo_gshard.wings.inference.decoding.state import SearchKind, StateShape
from lingvo_gshard.wings.inference.engine import shapes
from lingvo_gshard.wings.inference.engine.decode_batch import DecodeBatch
from lingvo_gshard.wings.inference.engine.shapes import EngineOptions, Plan, ShapeSelector
from lingvo_gshard.wings.inference.engine.waiting import (
    BeamText,
    DecodedText,
    SampledText,
    WaitingTexts,
)
from lingvo_gshard.wings.inference.model_facts import ModelFacts, usual_tokens
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.programs.executables import STEPS, Executables, ProgramKey
from lingvo_gshard.wings.inference.requests import Answer, Request

# Steps of a call while someone reads the tokens as they come.
_STREAMED_STEPS = 4
# A worker whose texts wait for programs asks for these programs again after this many seconds.
_ASK_SECONDS = 1.0


class Worker:
    """A thread with decode batches of its own.

    The thread never compiles. Texts wait until their programs are ready; other texts are decoded
    meanwhile.

    Attributes:
      busy_since: when the current call of a program began, in the time of time.monotonic; None
        between calls.
      has_died: whether the thread has ended although it should not.
    """

    def __init__(
        self,
        facts: ModelFacts,
        executables: Executables,
        weights: Sequence[jax.Array],
        waiting: WaitingTexts,
        options: EngineOptions,
    ):
        self._facts, self._executables, self._weights = facts, executables, weights
        self._waiting = waiting
        self._selector = ShapeSelector(facts, executables, waiting, options)
        self._batches: dict[SearchKind, DecodeBatch] = {}
        # Batches of texts that have outgrown their shape before a larger one was compiled.
        self._outgrown: list[DecodeBatch] = []
        self.busy_since: float | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self._thread.start()

    @property
    def has_died(self) -> bool:
        return not (self._thread.is_alive() or self._has_ended)

    def join(self) -> None:
        """Waits until the worker has stopped."""
        self._thread.join()

    def _run(self) -> None:
        while not self._waiting.is_stopped:
            version = self._waiting.version
            self._free_batches()
            # All of them, without stopping at the first that has something to do.
            if any([self._try(batch) for batch in self._batches_with_texts()]):
                continue
            waits_for_programs = bool(self._waiting.total or self._active())
            if self._waiting.is_over and not self._active():
                break
            self._waiting.wait(version, _ASK_SECONDS if waits_for_programs else None)
        self._has_ended = True

    def _active(self) -> int:
        return sum(batch.active for batch in (*self._batches.values(), *self._outgrown))

    def _batches_with_texts(self) -> list[DecodeBatch]:
        """Returns the batches that have texts, or that waiting texts will enter."""
        for kind in self._waiting.kinds():
            if kind not in self._batches:
                self._batches[kind] = DecodeBatch(
                    kind, self._facts, self._executables, self._weights
                )
        waiting = set(self._waiting.kinds())
        batches = [
            batch for kind, batch in self._batches.items() if batch.active or kind in waiting
        ]
        return [*batches, *self._outgrown]

    def _free_batches(self) -> None:
        """Frees the memory of batches without texts, those outgrown or of a forgotten kind."""
        self._outgrown = [batch for batch in self._outgrown if batch.active]
        for kind, batch in list(self._batches.items()):
            program = ProgramKey(STEPS, kind, batch.shape)
            if not batch.active and batch.shape and not self._executables.is_loaded(program):
                del self._batches[kind]

    def _try(self, batch: DecodeBatch) -> bool:
        """Advances a batch if it can be; returns whether it did."""
        self._complete(batch, batch.drop_canceled())
        entering: list[DecodedText] = []
        try:
            plan = None if batch in self._outgrown else self._enter(batch, entering)
            plan = plan or self._stay(batch)
            if plan is None:
                return bool(entering)
            self.busy_since = time.monotonic()
            self._advance(batch, plan)
        except BaseException as error:  # Those who wait for the answers learn of it.
            self._fail(batch, entering, error)
        finally:
            self.busy_since = None
        return True

    def _advance(self, batch: DecodeBatch, plan: Plan) -> None:
        """Admits waiting texts to a batch, then decodes a few tokens of all its texts."""
        batch.resize(plan.shape)
        for admission in plan.admissions:
            batch.admit(admission)
        self._complete(batch, batch.step(self._steps(batch), self._enough(batch)))

    def _complete(self, batch: DecodeBatch, rows: Sequence[DecodedText]) -> None:
        self._waiting.finish(batch.kind, len(rows))
        for row in rows:
            row.answer.complete(row.text, row.hypotheses())

    def _enter(self, batch: DecodeBatch, entering: list[DecodedText]) -> Plan | None:
        """Adds the texts that enter now to `entering`. Returns how they do; None if none can."""
        kind = batch.kind
        most = self._selector.largest(kind)
        waiting, free = self._waiting.count(kind), most - batch.active
        if not waiting or (waiting > free and free < max(most // shapes.FREE_SHARE, 1)):
            return None
        # While few wait, the other workers take their share.
        share = max(self._waiting.share(kind) - batch.active, 1)
        wanted = max(map(self._selector.size, batch.texts), default=0)
        found: Plan | None = None
        failed: list[tuple[DecodedText, BaseException]] = []

        def choose(rows: list[DecodedText], is_shared: bool) -> list[DecodedText]:
            nonlocal found
            chosen = self._selector.suiting(rows, min(free, share), wanted, is_shared)
            found = self._selector.usable(batch, chosen)
            if not found:
                able = self._able(batch, rows, failed)
                chosen = self._selector.suiting(able, min(free, share), wanted, is_shared)
                chosen, found = self._fewer(batch, chosen)
            return [*chosen, *(row for row, _ in failed)]

        taken = self._waiting.take(kind, choose)
        self._waiting.finish(kind, len(failed))
        for row, error in failed:
            row.answer.put(error)
        if found:
            entering += [row for row in taken if all(row is not one for one, _ in failed)]
        return found

    def _fewer(
        self, batch: DecodeBatch, rows: Sequence[DecodedText]
    ) -> tuple[Sequence[DecodedText], Plan | None]:
        """Returns the first texts of some that can enter together, and how."""
        for count in (len(rows), *(n for n in shapes.ROWS[::-1] if n < len(rows))):
            plan = self._selector.usable(batch, rows[:count], wants=False) if count else None
            if plan:
                return rows[:count], plan
        return (), None

    def _able(
        self,
        batch: DecodeBatch,
        rows: Sequence[DecodedText],
        failed: list[tuple[DecodedText, BaseException]],
    ) -> list[DecodedText]:
        """Returns the texts whose programs are there; `failed` gets those whose never will be."""
        plans: dict[tuple[int, int], Plan | None] = {}
        able = []
        for row in rows:
            like = self._selector.like(row)
            if like not in plans:
                wants = not self._selector.is_exact(batch.kind)
                plans[like] = self._selector.usable(batch, [row], wants)
            if plans[like]:
                able.append(row)
                continue
            keys = self._selector.best(batch, [row]).keys(batch.kind)
            error = self._executables.failure(keys, row.created)
            if error:
                failed.append((row, error))
        return able

    def _stay(self, batch: DecodeBatch) -> Plan | None:
        """Returns how a batch goes on without new texts; None if it cannot.

        Texts that need a larger shape, which is not compiled, leave it, so that others go on.
        """
        if not batch.active:
            return None
        plan = self._selector.usable(batch)
        if plan is not None:
            return plan
        keys = self._selector.best(batch).keys(batch.kind)
        error = self._executables.failure(keys, min(row.created for row in batch.texts))
        if error:
            raise error
        if batch in self._outgrown:
            return None
        assert batch.shape is not None
        length = batch.shape.length
        outgrown = [row for row in batch.texts if self._selector.size(row) > length]
        if outgrown:
            self._outgrown.append(batch.split(outgrown))
        return Plan(batch.shape) if batch.active else None

    def _steps(self, batch: DecodeBatch) -> int:
        """Returns the largest number of steps of the next call."""
        assert batch.shape is not None
        room = batch.shape.length - batch.end
        streams = any(row and row.answer.request.streams for row in batch.rows)
        stops = any(row and row.answer.request.should_stop for row in batch.rows)
        most = _STREAMED_STEPS if streams or stops else self._facts.most_steps
        return min(room, most)

    def _enough(self, batch: DecodeBatch) -> int:
        """Returns how many texts must end for a call to return early."""
        if not self._waiting.count(batch.kind):
            return len(batch.rows)
        return max(len(batch.rows) // shapes.FREE_SHARE - batch.free, 1)

    def _fail(
        self, batch: DecodeBatch, entering: Sequence[DecodedText], error: BaseException
    ) -> None:
        """Reports an error to all who wait for a batch, and gives the batch up."""
        if batch in self._outgrown:
            self._outgrown.remove(batch)
        else:
            del self._batches[batch.kind]
        lost = {id(row): row for row in (*batch.rows, *entering) if row}.values()
        self._waiting.finish(batch.kind, len(lost))
        for answer in {id(row.answer): row.answer for row in lost}.values():
            answer.put(error)


class Engine:
    """Answers requests with one model.

    Requests may come from any thread, and have different options. Requests with the same kind of
    search are decoded together. The answer to a request does not depend on other requests, up to
    the rounding of floating-point sums.
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
          weights: the decoding weights, outputs of the PREPARE program.
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
        """Compiles the programs for one text and for many of such lengths; no request waits."""
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

    def stuck(self, seconds: float) -> list[str]:
        """Returns which threads decode for longer than a time, or have ended, in words."""
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
        if facts.has_states and beam_size > 1:
            raise UserError(
                f"beam_size is {beam_size}; 1 was expected, because layers of the model keep one "
                "state for each text"
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
            count = len(os.sched_getaffinity(0)) if self.executables.is_on_one_cpu else 1
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
