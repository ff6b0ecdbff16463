"""WaitingRows: the texts that wait for a place, shared by the workers of an engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from lingvo_gshard.decoding.kinds import SearchKind
from lingvo_gshard.inference.engine.row import Row


class WaitingRows:
    """Queues of texts, one for each kind of search.

    Attributes:
      workers: the number of workers that share it.
      is_stopped: whether workers stop after their current call, whatever waits.
    """

    def __init__(self):
        self.workers = 1
        self._queues: dict[SearchKind, deque[Row]] = {}
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

    def take(self, kind: SearchKind, most: int) -> list[Row]:
        """Returns the next texts of a kind, which wait no longer."""
        with self._changed:
            queue = self._queues.get(kind, deque())
            return [queue.popleft() for _ in range(min(most, len(queue)))]

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
