"""Cell: one small file of a bucket that several processes change, each change atomic.

Buckets have no appends and no files that are created exclusively. They do have conditional writes:
a write succeeds only if the file is still the one that was read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from lingvo_gshard.core.files.attempts import attempt
from lingvo_gshard.core.files.paths import GivenPath
from lingvo_gshard.core.files.stores import key_value_store

_Result = TypeVar("_Result")

# Identifies one write of a file. Two writes of equal bytes have different generations.
Generation = bytes


class Cell:
    """A file of a bucket with conditional reads and writes."""

    def __init__(self, path: GivenPath):
        """Names the file; it need not exist."""
        self._path = os.fspath(path)
        self._opened: Any = None

    def read(self) -> tuple[bytes | None, Generation]:
        """Returns the content and its generation; None, with a generation, if there is no file."""
        found = self._call(lambda store: store.read("").result())
        return (found.value if found.state == "value" else None), found.stamp.generation

    def write(self, content: bytes, expected: Generation) -> Generation | None:
        """Writes the file if it is still the one that was read.

        A write whose answer was lost and that was repeated returns None, although it succeeded:
        read the file to find out.

        Args:
          content: the new content.
          expected: the generation that `read` or `write` returned.

        Returns:
          The new generation; None if the file has changed.
        """
        stamp = self._call(
            lambda store: store.write("", content, if_equal=expected).result(), writes=True
        )
        return stamp.generation or None

    def delete(self, expected: Generation) -> None:
        """Deletes the file if it is still the one that was read."""
        self._call(lambda store: store.write("", None, if_equal=expected).result(), writes=True)

    def append(self, line: bytes) -> None:
        """Adds bytes to the end of the file, which is created if it is not there."""
        while True:
            content, generation = self.read()
            if self.write((content or b"") + line, generation):
                return

    def _call(self, request: Callable[[Any], _Result], writes: bool = False) -> _Result:
        return attempt(self._path, lambda: request(self._store()), writes)

    def _store(self) -> Any:
        if self._opened is None:
            import tensorstore

            self._opened = tensorstore.KvStore.open(key_value_store(self._path)).result()
        return self._opened
