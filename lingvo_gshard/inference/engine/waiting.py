"""WaitingRows: the texts that wait for a place, shared by the workers of an engine."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

from lingvo_gshard.decoding.kinds import SearchKind
from lingvo_gshard.inference.engine.row import Row
from lingvo_gshard.inference.engine.turns import Turns
from lingvo_gshard.inference.requests import Answer

# The next texts, among which those that suit are looked for.
_WINDOW = 512


class WaitingRows:
    """The waiting texts of each kind of search.

    Attributes:
      workers: the number of workers that share it.
      is_stopped: whether workers stop after their current call, whatever waits.
      version: changes when there may be something to do for a worker that found nothing.
    """

    def __init__(self):
        self.workers, self.version = 1, 0
        self._turns: dict[SearchKind, Turns] = {}
        self._of_answer: dict[Answer, list[Row]] = {}
        self._under_way: collections.Counter[SearchKind] = collections.Counter()
        self._changed = threading.Condition()
        self._is_closed = False
        self.is_stopped = False

    def put(self, rows: Sequence[Row]) -> None:
        """Adds texts at the end. Raises ValueError if the engine is closed."""
        with self._changed:
            if self._is_closed:
                raise ValueError("the engine is closed")
            for row in rows:
                self._turns.setdefault(_kind(row), Turns()).add(row)
                self._of_answer.setdefault(row.answer, []).append(row)
            self.wake()

    def close(self) -> None:
        """Takes no more texts; workers stop when none waits."""
        with self._changed:
            self._is_closed = True
            self.wake()

    def stop(self) -> None:
        """Takes no more texts and gives up those that wait."""
        with self._changed:
            self._is_closed = self.is_stopped = True
            self._turns.clear()
            self._of_answer.clear()
            self.wake()

    def cancel(self, answer: Answer) -> None:
        """Ends the waiting texts of an answer; those that are decoded are not here."""
        with self._changed:
            rows = self._of_answer.pop(answer, [])
            for row in rows:
                self._turns[_kind(row)].remove(row)
            self.wake()
        for row in rows:
            answer.complete(row.text, ())

    def wake(self) -> None:
        """Has idle workers look for something to do."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()

    def wait(self, version: int, seconds: float | None) -> None:
        """Waits until there may be something to do.

        Args:
          version: the version when there was nothing.
          seconds: how long to wait at most; None for no limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, seconds)

    def count(self, kind: SearchKind) -> int:
        """Returns the number of texts of a kind that wait."""
        return len(self._turns.get(kind, ()))

    def share(self, kind: SearchKind) -> int:
        """Returns the number of texts of a kind that each worker has if all are divided evenly."""
        with self._changed:
            texts = self.count(kind) + self._under_way[kind]
            return -(-texts // self.workers)

    def finish(self, kind: SearchKind, texts: int) -> None:
        """Forgets texts that a worker has taken before."""
        with self._changed:
            self._under_way[kind] -= texts

    @property
    def total(self) -> int:
        """The number of texts of all kinds that wait."""
        with self._changed:
            return sum(map(len, self._turns.values()))

    @property
    def is_over(self) -> bool:
        """Whether no texts wait, and none will come."""
        return self._is_closed and not self.total

    def take(self, kind: SearchKind, choose: Callable[[list[Row], bool], list[Row]]) -> list[Row]:
        """Returns texts of a kind, which wait no longer.

        Args:
          kind: how tokens are chosen.
          choose: returns those to take of the next texts. Its second argument says whether they are
            of several clients, or groups of one. Other threads wait for it.
        """
        with self._changed:
            turns = self._turns.get(kind)
            if not turns:
                return []
            window = turns.first(_WINDOW)
            taken = choose(window, turns.is_shared)
            chosen = set(map(id, taken))
            for row in window:
                if id(row) not in chosen:
                    row.passes += bool(taken)
                    continue
                turns.remove(row, is_served=True)
                rows = self._of_answer[row.answer]
                rows.remove(row)
                if not rows:
                    del self._of_answer[row.answer]
            self._under_way[kind] += len(taken)
            return taken

    def kinds(self) -> list[SearchKind]:
        """Returns the kinds with waiting texts."""
        with self._changed:
            return [kind for kind, turns in self._turns.items() if turns]


def _kind(row: Row) -> SearchKind:
    return row.answer.request.options.kind
