"""PreparedTable: the rows of a split of prepared data, read from disk by their numbers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import mmap
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore

from lingvo_gshard.core import UserError, names, objects, regular, stores
from lingvo_gshard.data import Group, Records
from lingvo_gshard.wings.preparation.prepared.manifest import Manifest, Shard, decode


class Lengths:
    """The lengths of all rows, mapped from files and not held in memory."""

    def __init__(self, root: pathlib.Path, shards: Sequence[Shard]):
        """Maps the files of shards, which number their rows one after another.

        Raises:
          UserError: a file is missing or damaged.
        """
        self._root, self._shards = root, shards
        self._tables = [_mapped(root, shard) for shard in shards]
        self._starts = np.cumsum([0, *(shard.rows for shard in shards)])

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the source and target tokens, int64 [N,2], of rows, int64 [N].

        Raises:
          UserError: a file was cut off since it was mapped.
        """
        result = np.zeros((len(rows), 2), np.int64)
        for shard, places in by_shard(rows, self._starts):
            table = self._readable(shard)
            result[places] = table[rows[places] - self._starts[shard]]
            _release(table)
        return result

    def shards(self) -> Iterator[np.ndarray]:
        """Yields the lengths of each shard's rows, [N,2]."""
        for shard in range(len(self._tables)):
            table = self._readable(shard)
            yield np.asarray(table)
            _release(table)

    def _readable(self, shard: int) -> np.ndarray:
        """Returns a shard's table; UserError if its file was cut off since it was mapped.

        The system kills a process that reads behind a file's end.
        """
        table: Any = self._tables[shard]
        mapping = _mapping(table)
        if mapping is not None and mapping.size() < table.offset + table.nbytes:
            raise UserError(
                f"{self._root / self._shards[shard].lengths} was cut off to {mapping.size():,} "
                "bytes while it was read; prepare the data again"
            )
        return table


def by_shard(rows: np.ndarray, starts: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number of each shard with some of the rows, and the places of these, ascending.

    `starts` has the number of the first row of each shard, and of the row after the last.
    """
    if not len(rows):
        return
    order = np.argsort(rows, kind="stable")
    shards = np.searchsorted(starts, rows[order], side="right") - 1
    found, begins = np.unique(shards, return_index=True)
    yield from zip(found.tolist(), np.split(order, begins[1:]), strict=True)


def _mapped(root: pathlib.Path, shard: Shard) -> np.ndarray:
    path = root / shard.lengths
    try:
        local = objects.local_file(path)
        regular.require_regular(local)
        table = np.load(local, mmap_mode="r")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file, but {shard.file} needs it") from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: the lengths cannot be read: {error}") from None
    if table.shape != (shard.rows, 2) or table.dtype not in (np.uint16, np.uint32):
        raise UserError(
            f"{path}: has {table.dtype.name}{list(table.shape)}; the manifest says "
            f"{shard.rows:,} rows of two numbers"
        )
    return table


def _release(table: np.ndarray) -> None:
    """Lets the system take back the pages of a file that were read. They may stay in its cache."""
    mapping = _mapping(table)
    if mapping is not None:
        mapping.madvise(mmap.MADV_DONTNEED)


def _mapping(table: np.ndarray) -> mmap.mmap | None:
    """Returns the mapping behind a table; None for a table without rows."""
    return getattr(table, "_mmap", None)


_log = logging.getLogger(__name__)

ERROR, SKIP = "error", "skip"
# One thread reads, with a small buffer, since rows are far apart.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_BUFFER_BYTES = 4096
# Systems allow 1,024 open files or more.
_MOST_OPEN = 512


class PreparedTable:
    """The rows of a split, numbered by language, source and shard.

    `damaged` counts the rows of each file that were asked for and could not be read.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        manifest: Manifest,
        split: str,
        on_damage: str = ERROR,
        languages: Sequence[str] = (),
    ):
        """Opens the lengths and finds the shards.

        Args:
          on_damage: ERROR to refuse shards that cannot be read, SKIP to leave out their rows.
          languages: the languages whose rows are used; empty: all.

        Raises:
          UserError: there is no such split or language, or a file is missing or has another size.
        """
        names.check(
            split, manifest.splits, f"{directory}: the prepared data has no split {split!r}"
        )
        self._root = stores.path_of(directory)
        self._width = manifest.id_bytes
        self._on_damage = on_damage
        self.damaged: collections.Counter[str] = collections.Counter()
        shards = [shard for shard in manifest.splits[split] if shard.rows]
        _check_languages(languages, split, shards)
        self.shards = sorted(
            (shard for shard in shards if not languages or shard.language in languages),
            key=lambda shard: (shard.language, shard.source, shard.file),
        )
        self._readable = [self._is_readable(shard) for shard in self.shards]
        self._starts = np.cumsum([0, *(shard.rows for shard in self.shards)])
        self.lengths = Lengths(self._root, self.shards)
        self.groups = _groups(self.shards)
        # A reader has a place in its file, which threads must not move for one another.
        self._lock = threading.Lock()
        self._reader = functools.lru_cache(_MOST_OPEN)(self._open)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64 [N,2], source and target tokens of rows."""
        return self.lengths.of(rows)

    def read(self, rows: np.ndarray) -> Records:
        """Returns the records of rows, int64, in any order. Skipped rows have no tokens.

        Raises:
          UserError: a shard cannot be read. Names the file.
        """
        rows = np.unique(rows)
        records: list[bytes] = [b""] * len(rows)
        with self._lock:
            self._fill(records, rows)
        return Records(rows, *decode(records, self._width))

    def _fill(self, records: list[bytes], rows: np.ndarray) -> None:
        for shard, places in by_shard(rows, self._starts):
            inside = rows[places] - self._starts[shard]
            for place, content in zip(places.tolist(), self._read(shard, inside), strict=True):
                records[place] = content

    def _read(self, number: int, rows: np.ndarray) -> list[bytes]:
        """Returns the records of some rows of a shard."""
        shard, empty = self.shards[number], bytes(self._width)
        if not self._readable[number]:
            return [empty] * len(rows)
        reader, lengths = self._reader(number), self.lengths.of(rows + self._starts[number])
        found = []
        for row, (source, target) in zip(rows.tolist(), lengths.tolist(), strict=True):
            try:
                reader.seek(row)
                content = reader.read()
                _check(content, source, target, self._width)
            except (RuntimeError, IndexError, ValueError) as error:
                self._report(shard, f"row {row:,} cannot be read: {_first_line(error)}")
                content = empty
                # A reader that has failed does not recover.
                self._reader.cache_clear()
                reader = self._reader(number)
            found.append(content)
        return found

    def _open(self, number: int) -> Any:
        path = objects.local_file(self._root / self.shards[number].file)
        return array_record_module.ArrayRecordReader(
            str(path), _READER_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
        )

    def _is_readable(self, shard: Shard) -> bool:
        """Returns whether a shard has the manifest's size; UserError if damage is an error."""
        size = objects.size_of(self._root / shard.file)
        if size == shard.bytes:
            return True
        words = "there is no such file" if size is None else f"has {size:,} bytes"
        self._report(shard, f"{words}; the manifest says {shard.bytes:,} bytes", shard.rows)
        return False

    def _report(self, shard: Shard, problem: str, rows: int = 1) -> None:
        """Counts rows that cannot be read, or raises ValueError."""
        path = self._root / shard.file
        if self._on_damage == ERROR:
            raise UserError(
                f"{path}: {problem}. Restore the file or prepare the data again; "
                'input.on_damage = "skip" leaves out its rows'
            )
        if not self.damaged[shard.file]:
            _log.warning("%s: %s. Rows that cannot be read are left out", path, problem)
        self.damaged[shard.file] += rows


def _check_languages(languages: Sequence[str], split: str, shards: Sequence[Shard]) -> None:
    found = {shard.language for shard in shards}
    for language in languages:
        names.check(language, found, f"input.languages: {split} has no rows of {language!r}")


def _groups(shards: Sequence[Shard]) -> list[Group]:
    found: dict[tuple[str, str], Group] = {}
    begin = 0
    for shard in shards:
        key = shard.language, shard.source
        before = found.get(key, Group(*key, begin, 0, (0, 0)))
        source, target = before.tokens
        tokens = source + shard.source_tokens, target + shard.target_tokens
        found[key] = dataclasses.replace(before, rows=before.rows + shard.rows, tokens=tokens)
        begin += shard.rows
    return list(found.values())


def _check(content: bytes, source: int, target: int, width: int) -> None:
    """Raises ValueError if a record has other lengths than the planned ones."""
    stated = int.from_bytes(content[:width], "little")
    if len(content) != width * (1 + source + target) or stated != source:
        raise UserError(
            f"it has {len(content)} bytes and {stated:,} source tokens, but its lengths are "
            f"{source:,} and {target:,} tokens"
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
