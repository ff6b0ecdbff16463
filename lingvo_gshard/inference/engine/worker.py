"""Worker: a thread that decodes the texts of an engine, one lane after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.inference.decoding.state import SearchKind
from lingvo_gshard.inference.engine import placement
from lingvo_gshard.inference.engine.lane import Lane
from lingvo_gshard.inference.engine.placement import EngineOptions, Placement, Plan
from lingvo_gshard.inference.engine.waiting import Row, WaitingRows
from lingvo_gshard.inference.programs.executables import STEPS, Executables, ProgramKey
from lingvo_gshard.tasks.model_facts import ModelFacts

# Steps of a call while someone reads the tokens as they come.
_STREAMED_STEPS = 4
# A worker whose texts wait for programs asks for these programs again after this many seconds.
_ASK_SECONDS = 1.0


class Worker:
    """A thread with lanes of its own.

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
        waiting: WaitingRows,
        options: EngineOptions,
    ):
        self._facts, self._executables, self._weights = facts, executables, weights
        self._waiting = waiting
        self._placement = Placement(facts, executables, waiting, options)
        self._lanes: dict[SearchKind, Lane] = {}
        # Lanes of texts that have outgrown their shape before a larger one was compiled.
        self._outgrown: list[Lane] = []
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
            self._free_lanes()
            # A list, so that `any` does not stop at the first lane that has something to do.
            if any([self._try(lane) for lane in self._lanes_with_texts()]):
                continue
            waits_for_programs = bool(self._waiting.total or self._active())
            if self._waiting.is_over and not self._active():
                break
            self._waiting.wait(version, _ASK_SECONDS if waits_for_programs else None)
        self._has_ended = True

    def _active(self) -> int:
        """Returns the number of texts in lanes."""
        return sum(lane.active for lane in (*self._lanes.values(), *self._outgrown))

    def _lanes_with_texts(self) -> list[Lane]:
        """Returns the lanes with texts, and the lanes that waiting texts will enter."""
        for kind in self._waiting.kinds():
            if kind not in self._lanes:
                self._lanes[kind] = Lane(kind, self._facts, self._executables, self._weights)
        waiting = set(self._waiting.kinds())
        lanes = [lane for kind, lane in self._lanes.items() if lane.active or kind in waiting]
        return [*lanes, *self._outgrown]

    def _free_lanes(self) -> None:
        """Frees the memory of lanes without texts, if they are outgrown or their kind forgotten."""
        self._outgrown = [lane for lane in self._outgrown if lane.active]
        for kind, lane in list(self._lanes.items()):
            program = ProgramKey(STEPS, kind, lane.shape)
            if not lane.active and lane.shape and not self._executables.is_loaded(program):
                del self._lanes[kind]

    def _try(self, lane: Lane) -> bool:
        """Advances a lane if it can go on; returns whether anything was done."""
        self._complete(lane, lane.drop_canceled())
        entering: list[Row] = []
        try:
            plan = None if lane in self._outgrown else self._enter(lane, entering)
            plan = plan or self._stay(lane)
            if plan is None:
                return bool(entering)
            self.busy_since = time.monotonic()
            self._advance(lane, plan)
        except BaseException as error:  # The callers who wait for the answers get the error.
            self._fail(lane, entering, error)
        finally:
            self.busy_since = None
        return True

    def _advance(self, lane: Lane, plan: Plan) -> None:
        """Lets texts into a lane and decodes a few tokens."""
        lane.resize(plan.shape)
        for admission in plan.admissions:
            lane.admit(admission)
        self._complete(lane, lane.step(self._steps(lane), self._enough(lane)))

    def _complete(self, lane: Lane, rows: Sequence[Row]) -> None:
        self._waiting.finish(lane.kind, len(rows))
        for row in rows:
            row.answer.complete(row.text, row.hypotheses())

    def _enter(self, lane: Lane, entering: list[Row]) -> Plan | None:
        """Takes the texts that enter now. Returns how they do; None if none can.

        Args:
          lane: the lane that they enter.
          entering: gets the texts.
        """
        kind = lane.kind
        most = self._placement.largest(kind)
        waiting, free = self._waiting.count(kind), most - lane.active
        if not waiting or (waiting > free and free < max(most // placement.FREE_SHARE, 1)):
            return None
        # While few wait, the other workers take their share.
        share = max(self._waiting.share(kind) - lane.active, 1)
        wanted = max(map(self._placement.size, lane.texts), default=0)
        found: Plan | None = None
        failed: list[tuple[Row, BaseException]] = []

        def choose(rows: list[Row], is_shared: bool) -> list[Row]:
            nonlocal found
            chosen = self._placement.suiting(rows, min(free, share), wanted, is_shared)
            found = self._placement.usable(lane, chosen)
            if not found:
                able = self._able(lane, rows, failed)
                chosen = self._placement.suiting(able, min(free, share), wanted, is_shared)
                chosen, found = self._fewer(lane, chosen)
            return [*chosen, *(row for row, _ in failed)]

        taken = self._waiting.take(kind, choose)
        self._waiting.finish(kind, len(failed))
        for row, error in failed:
            row.answer.put(error)
        if found:
            entering += [row for row in taken if all(row is not one for one, _ in failed)]
        return found

    def _fewer(self, lane: Lane, rows: Sequence[Row]) -> tuple[Sequence[Row], Plan | None]:
        """Returns the first texts of some that can enter together, and how."""
        for count in (len(rows), *(n for n in placement.ROWS[::-1] if n < len(rows))):
            plan = self._placement.usable(lane, rows[:count], wants=False) if count else None
            if plan:
                return rows[:count], plan
        return (), None

    def _able(
        self, lane: Lane, rows: Sequence[Row], failed: list[tuple[Row, BaseException]]
    ) -> list[Row]:
        """Returns the texts whose programs are ready; `failed` gets texts whose programs failed."""
        plans: dict[tuple[int, int], Plan | None] = {}
        able = []
        for row in rows:
            like = self._placement.like(row)
            if like not in plans:
                wants = not self._placement.is_exact(lane.kind)
                plans[like] = self._placement.usable(lane, [row], wants)
            if plans[like]:
                able.append(row)
                continue
            keys = self._placement.best(lane, [row]).keys(lane.kind)
            error = self._executables.failure(keys, row.created)
            if error:
                failed.append((row, error))
        return able

    def _stay(self, lane: Lane) -> Plan | None:
        """Returns the plan of a lane without new texts; None if the lane cannot go on.

        Texts that need a larger shape that is not compiled leave the lane, so that the other texts
        go on.
        """
        if not lane.active:
            return None
        plan = self._placement.usable(lane)
        if plan is not None:
            return plan
        keys = self._placement.best(lane).keys(lane.kind)
        error = self._executables.failure(keys, min(row.created for row in lane.texts))
        if error:
            raise error
        if lane in self._outgrown:
            return None
        assert lane.shape is not None
        length = lane.shape.length
        outgrown = [row for row in lane.texts if self._placement.size(row) > length]
        if outgrown:
            self._outgrown.append(lane.split(outgrown))
        return Plan(lane.shape) if lane.active else None

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
        return max(len(lane.rows) // placement.FREE_SHARE - lane.free, 1)

    def _fail(self, lane: Lane, entering: Sequence[Row], error: BaseException) -> None:
        """Reports an error to all who wait for a lane, and gives the lane up."""
        if lane in self._outgrown:
            self._outgrown.remove(lane)
        else:
            del self._lanes[lane.kind]
        lost = {id(row): row for row in (*lane.rows, *entering) if row}.values()
        self._waiting.finish(lane.kind, len(lost))
        for answer in {id(row.answer): row.answer for row in lost}.values():
            answer.put(error)
