"""ShardWriter: writes one shard of prepared data and the lengths of its rows."""

from __future__ import annotations

import array
import contextlib
import os
import pathlib
import re
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore

from lingvo_gshard.core import UserError
from lingvo_gshard.wings.preparation.prepared.manifest import Shard, sha256_of

# Sentence pairs have some dozens of ids. In a group of one, a pair takes 1.5 times the size of its
# ids on disk, and 11 bytes of a reader's memory for its place. In a group of 16, a pair takes 1.05
# times the size and 0.7 bytes. A core then still reads 300 thousand pairs a second in random order.
# Compression (zstd) would save a third of the disk, but the bytes would depend on the version of
# zstd.
PAIRS_PER_GROUP = 16
# Texts are longer, and reading one should not read others.
TEXTS_PER_GROUP = 1
_OPTIONS = "group_size:{},uncompressed"
_NAME = re.compile(r"[\w@+-][\w.@+-]*", re.ASCII)
_PARTIAL = ".partial"


def shard_file(split: str, language: str, source: str, number: int, count: int) -> str:
    """Returns the path of a shard within the directory; UserError for names unfit for a file."""
    for kind, name in (("split", split), ("language", language), ("source", source)):
        if not _NAME.fullmatch(name):
            raise UserError(
                f"The {kind} {name!r} is no name of a file: letters, digits and _ . @ + - were "
                "expected, and no dot at the beginning"
            )
    return f"{split}/{language}/{source}-{number:05d}-of-{count:05d}.array_record"


def lengths_file(shard: str) -> str:
    """Returns the path of the lengths of a shard's rows."""
    return shard.removesuffix(".array_record") + ".lengths.npy"


class ShardWriter(contextlib.AbstractContextManager["ShardWriter"]):
    """Writes one shard; the bytes depend on the rows alone.

    The files get their names in `close`, so a shard with its name is complete. As a context
    manager, it closes the shard, or discards it after an error.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        split: str,
        language: str,
        source: str,
        *,
        number: int = 0,
        count: int = 1,
        rows_per_group: int = PAIRS_PER_GROUP,
    ):
        """Makes the folder in a directory of prepared data, and opens the shard.

        Args:
          number: number of the shard, from 0, among `count` of this split, language and source.
          rows_per_group: rows that are read together, PAIRS_PER_GROUP or TEXTS_PER_GROUP.

        Raises:
          UserError: a name is unfit for a file.
          OSError: the folder cannot be made.
        """
        self._root = pathlib.Path(directory)
        self._file = shard_file(split, language, source, number, count)
        self._names = {"split": split, "language": language, "source": source}
        self._lengths = array.array("I")
        self._shard: Shard | None = None
        path = self._root / self._file
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = array_record_module.ArrayRecordWriter(
            f"{path}{_PARTIAL}", _OPTIONS.format(rows_per_group)
        )

    def write_record(self, encoded: bytes, source_tokens: int, target_tokens: int) -> None:
        """Appends a row: its record, as the manifest's module describes it, and numbers of ids.

        Raises:
          RuntimeError: the file cannot be written.
        """
        self._writer.write(encoded)
        self._lengths.extend((source_tokens, target_tokens))

    @property
    def rows(self) -> int:
        """The number of rows written."""
        return len(self._lengths) // 2

    def close(self) -> Shard:
        """Completes the shard, and returns its entry of the manifest.

        Raises:
          OSError, RuntimeError: a file cannot be written.
        """
        if self._shard is None:
            self._writer.close()
            self._shard = self._complete()
        return self._shard

    def discard(self) -> None:
        """Removes what was written of a shard that is not complete."""
        with contextlib.suppress(RuntimeError):
            self._writer.close()
        for name in (self._file, lengths_file(self._file)):
            pathlib.Path(f"{self._root / name}{_PARTIAL}").unlink(missing_ok=True)

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.close()
        elif self._shard is None:
            self.discard()

    def _complete(self) -> Shard:
        lengths = np.frombuffer(self._lengths, np.uint32).reshape(-1, 2)
        narrow = np.uint16 if lengths.max(initial=0) <= np.iinfo(np.uint16).max else np.uint32
        lengths_name = lengths_file(self._file)
        # numpy.save would append .npy to a path, but not to a file.
        with open(f"{self._root / lengths_name}{_PARTIAL}", "wb") as file:
            np.save(file, lengths.astype(narrow))
        entry: dict[str, Any] = {}
        # The file of the shard is named last: readers take a shard with this name as complete.
        for kind, name in (("lengths_", lengths_name), ("", self._file)):
            path = self._root / name
            partial = pathlib.Path(f"{path}{_PARTIAL}")
            _flush(partial)
            entry[f"{kind}bytes"] = partial.stat().st_size
            entry[f"{kind}sha256"] = sha256_of(partial)
            partial.replace(path)
        source_tokens, target_tokens = lengths.sum(axis=0, dtype=np.uint64).tolist()
        return Shard(
            **self._names,
            file=self._file,
            lengths=lengths_name,
            rows=self.rows,
            source_tokens=source_tokens,
            target_tokens=target_tokens,
            **entry,
        )


def _flush(path: pathlib.Path) -> None:
    """Has the system write a file to its disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
