"""Prefetcher: makes the next items of a stream in a background thread."""

import collections
import concurrent.futures
from typing import Any, Protocol

from lingvo_gshard.core.errors import UserError


class Stream(Protocol):
    """An iterator whose position can be saved and restored."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


class Prefetcher:
    """Returns the items of a stream, up to `depth` of them made in advance by one thread.

    The saved position is that after the last item returned, however many were made in advance. An
    error of the stream is raised in place of the item that it prevented.
    """

    def __init__(self, stream: Stream, depth: int):
        """Takes over a stream, which nobody else may use; ValueError for a negative depth."""
        if depth < 0:
            raise UserError(f"input.prefetch_batches must be at least 0, not {depth}")
        self._stream = stream
        self._depth = depth
        self._state = stream.get_state()
        self._pending: collections.deque[concurrent.futures.Future] = collections.deque()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "prefetch") if depth else None

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> Any:
        if self._worker is None:
            item, self._state = self._make()
            return item
        # One more than the depth, since the first is returned now.
        while len(self._pending) <= self._depth:
            self._pending.append(self._worker.submit(self._make))
        item, self._state = self._pending.popleft().result()
        return item

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last item returned."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position that `get_state` returned, and drops items made in advance."""
        self._discard()
        self._stream.set_state(state)
        self._state = self._stream.get_state()

    def close(self) -> None:
        """Stops the thread. The iterator must not be used afterwards."""
        self._discard()
        if self._worker is not None:
            self._worker.shutdown()

    def _make(self):
        item = next(self._stream)
        return item, self._stream.get_state()

    def _discard(self):
        for future in self._pending:
            future.cancel()
        concurrent.futures.wait(self._pending)
        self._pending.clear()
