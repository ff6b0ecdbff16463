"""Makes the next items of a stream in the background, and keeps its positions exact."""

import collections
import concurrent.futures
from typing import Any, Protocol


class Stream(Protocol):
    """An iterator that can say and restore its position."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


class Prefetcher:
    """The same items as `stream`, up to `depth` of them made ahead by one thread.

    get_state() is the position after the last item handed out, whatever has been made since.
    An error in the stream is raised where its item would have come.
    """

    def __init__(self, stream: Stream, depth: int):
        """Takes the stream over; ValueError for a negative depth."""
        if depth < 0:
            raise ValueError(f"input.prefetch_batches must be at least 0, not {depth}")
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
        # One more than the depth: the first of them is handed out now.
        while len(self._pending) <= self._depth:
            self._pending.append(self._worker.submit(self._make))
        item, self._state = self._pending.popleft().result()
        return item

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the last item handed out."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that get_state gave; what was made ahead is thrown away."""
        self._discard()
        self._stream.set_state(state)
        self._state = self._stream.get_state()

    def close(self) -> None:
        """Ends the thread. The iterator must not be used any more."""
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
