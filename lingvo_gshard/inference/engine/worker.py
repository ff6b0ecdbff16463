"""Worker: a thread that decodes the texts of an engine, one lane after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.decoding.kinds import SearchKind, StateShape
from lingvo_gshard.decoding.model_facts import ModelFacts
from lingvo_gshard.inference.engine import buckets
from lingvo_gshard.inference.engine.engine_options import EngineOptions
from lingvo_gshard.inference.engine.lane import Lane
from lingvo_gshard.inference.engine.row import Row
from lingvo_gshard.inference.engine.waiting import WaitingRows
from lingvo_gshard.inference.programs.executables import Executables

# Steps of a call while someone reads the tokens as they come.
_STREAMED_STEPS = 4
# With this many waiting texts a smaller shape pays for compiling its programs.
_MANY = 4096


class Worker:
    """A thread with lanes of its own."""

    def __init__(
        self,
        facts: ModelFacts,
        executables: Executables,
        weights: Sequence[jax.Array],
        waiting: WaitingRows,
        options: EngineOptions,
    ):
        self._facts, self._executables, self._weights = facts, executables, weights
        self._waiting, self._options = waiting, options
        # In ascending order.
        self._row_counts = [rows * executables.batches for rows in buckets.ROWS]
        self._shapes = [
            StateShape(rows, length, min(length, facts.most_source))
            for rows in self._row_counts
            for length in buckets.LENGTHS
        ]
        self._lanes: dict[SearchKind, Lane] = {}
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until the worker has stopped."""
        self._thread.join()

    def _run(self) -> None:
        while not self._waiting.is_stopped:
            active = [kind for kind, lane in self._lanes.items() if lane.active]
            waiting = self._waiting.kinds(is_idle=not active)
            if waiting is None:
                return
            for kind in dict.fromkeys([*active, *waiting]):
                lane = self._lanes.setdefault(
                    kind, Lane(kind, self._facts, self._executables, self._weights)
                )
                entering = self._entering(lane)
                try:
                    self._advance(lane, entering)
                except BaseException as error:  # Those who wait for the answers learn of it.
                    self._fail(lane, entering, error)

    def _advance(self, lane: Lane, entering: Sequence[Row]) -> None:
        """Lets texts into a lane and decodes a few tokens."""
        shape = self._shape(lane, entering)
        if shape is None:
            return
        lane.resize(shape)
        if entering:
            lane.admit(entering, self._is_exact(lane.kind))
        done = lane.step(self._steps(lane), self._enough(lane))
        self._waiting.finish(lane.kind, len(done))
        for row in done:
            row.answer.complete(row.text, row.hypotheses())

    def _entering(self, lane: Lane) -> list[Row]:
        """Takes the texts that enter now."""
        kind = lane.kind
        most = self._largest(kind)
        waiting, free = self._waiting.count(kind), most - lane.active
        if not waiting or (waiting > free and free < max(most // buckets.FREE_SHARE, 1)):
            return []
        # While few wait, the other workers take their share.
        share = max(self._waiting.share(kind) - lane.active, 1)
        wanted = max((self._size(row) for row in lane.rows if row), default=0)
        return self._waiting.take(kind, min(free, share), self._size, wanted)

    def _largest(self, kind: SearchKind) -> int:
        """Returns the largest number of rows of a lane."""
        most = self._options.most_texts(kind.beam) * self._executables.batches
        fitting = (n for n in self._row_counts if n <= most)
        return max(fitting, default=self._row_counts[0])

    def _shape(self, lane: Lane, entering: Sequence[Row]) -> StateShape | None:
        """Returns the shape that a lane has next; None if it has nothing to do.

        A shape whose programs are compiled is preferred to a smaller one whose are not.
        """
        texts = [*(row for row in lane.rows if row), *entering]
        if not texts:
            return None
        rows = min(max(len(texts), self._waiting.share(lane.kind)), self._largest(lane.kind))
        length = max(map(self._size, texts))
        needed = StateShape(
            buckets.fitting(self._row_counts, rows), length, min(length, self._facts.most_source)
        )
        if self._is_exact(lane.kind):
            return needed
        larger = (shape for shape in self._shapes if shape.holds(needed))
        return next((s for s in larger if self._is_ready(lane.kind, s)), needed)

    def _is_exact(self, kind: SearchKind) -> bool:
        """Returns whether to compile the programs that fit best where larger ones are ready."""
        return self._options.exact or self._waiting.count(kind) >= _MANY

    def _is_ready(self, kind: SearchKind, shape: StateShape) -> bool:
        """Returns whether decoding in a shape needs no program that is not compiled."""
        keys = buckets.keys(kind, shape, self._executables.batches)
        return all(map(self._executables.is_ready, keys))

    def _size(self, row: Row) -> int:
        """Returns the length of a state that holds a text.

        Source and target share a size, so that there are few shapes.
        """
        wanted = max(self._positions(row), len(row.answer.request.source))
        return buckets.fitting(buckets.LENGTHS, wanted)

    def _positions(self, row: Row) -> int:
        """Returns the positions that a text probably needs: those so far and some more."""
        given, source = len(row.answer.request.given), len(row.answer.request.source)
        likely = source + source // 4 + 4 if source else row.limit
        return max(given + min(row.limit, likely), row.position + 1)

    def _steps(self, lane: Lane) -> int:
        """Returns the largest number of steps of the next call."""
        assert lane.shape is not None
        room = lane.shape.length - lane.end
        streams = any(row and row.answer.request.streams for row in lane.rows)
        stops = any(row and row.answer.request.should_stop for row in lane.rows)
        most = _STREAMED_STEPS if streams or stops else self._facts.most_steps
        return min(room, most)

    def _enough(self, lane: Lane) -> int:
        """Returns how many texts must end for a call to return early."""
        if not self._waiting.count(lane.kind):
            return len(lane.rows)
        return max(len(lane.rows) // buckets.FREE_SHARE - lane.free, 1)

    def _fail(self, lane: Lane, entering: Sequence[Row], error: BaseException) -> None:
        """Reports an error to all who wait for a lane, and gives the lane up."""
        del self._lanes[lane.kind]
        lost = {id(row): row for row in (*lane.rows, *entering) if row}.values()
        self._waiting.finish(lane.kind, len(lost))
        for answer in {id(row.answer): row.answer for row in lost}.values():
            answer.put(error)
