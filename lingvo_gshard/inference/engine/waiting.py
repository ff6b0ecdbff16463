"""WaitingRows: the texts that wait for a place, shared by the workers of an engine."""

from __future__ import annotations

import collections
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from lingvo_gshard.decoding.kinds import SearchKind
from lingvo_gshard.inference.engine.row import Row

# Texts that have waited longest, among which those that suit are looked for.
_WINDOW = 512
_MOST_PASSES = 16


class WaitingRows:
    """Queues of texts, one for each kind of search.

    Attributes:
      workers: the number of workers that share it.
      is_stopped: whether workers stop after their current call, whatever waits.
    """

    def __init__(self):
        self.workers = 1
        self._queues: dict[SearchKind, deque[Row]] = {}
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
                kind = row.answer.request.options.kind
                self._queues.setdefault(kind, deque()).append(row)
            self._changed.notify_all()

    def close(self) -> None:
        """Takes no more texts; workers stop when none waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Takes no more texts and gives up those that wait."""
        with self._changed:
            self._is_closed = self.is_stopped = True
            self._queues.clear()
            self._changed.notify_all()

    def count(self, kind: SearchKind) -> int:
        """Returns the number of texts of a kind that wait."""
        return len(self._queues.get(kind, ()))

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
            return sum(map(len, self._queues.values()))

    def peek(self, kind: SearchKind, most: int) -> list[Row]:
        """Returns the next texts of a kind, which go on waiting."""
        with self._changed:
            queue = self._queues.get(kind, ())
            return [queue[index] for index in range(min(most, len(queue)))]

    def take(
        self, kind: SearchKind, most: int, size_of: Callable[[Row], int], wanted: int
    ) -> list[Row]:
        """Returns texts of a kind that suit each other, which wait no longer.

        They are those of the nearest sizes: a batch costs what its longest text costs. No text is
        passed over more than _MOST_PASSES times.

        Args:
          kind: how tokens are chosen.
          most: the largest number of texts.
          size_of: returns the size of a text.
          wanted: the size that suits; 0: that of the text that has waited longest.
        """
        with self._changed:
            queue = self._queues.get(kind, deque())
            window = [queue.popleft() for _ in range(min(_WINDOW, len(queue)))]
            if window and (not wanted or window[0].passes >= _MOST_PASSES):
                wanted = size_of(window[0])
            # Sorting is stable: of the same size, those that have waited longest.
            nearest = sorted(window, key=lambda row: abs(math.log2(size_of(row) / wanted)))[:most]
            taken = set(map(id, nearest))
            left = [row for row in window if id(row) not in taken]
            for row in left:
                row.passes += 1
            queue.extendleft(reversed(left))
            self._under_way[kind] += len(nearest)
            return nearest

    def kinds(self, is_idle: bool) -> list[SearchKind] | None:
        """Returns the kinds with waiting texts; None if there is nothing more to do.

        Args:
          is_idle: whether to wait until there is one.
        """
        with self._changed:
            while True:
                found = [kind for kind, queue in self._queues.items() if queue]
                if found or not is_idle:
                    return found
                if self._is_closed:
                    return None
                self._changed.wait()
