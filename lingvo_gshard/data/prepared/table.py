"""Table: the rows of a split of prepared data, read by their numbers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import copies, objects, paths
from lingvo_gshard.data.batching.packing import Tokens
from lingvo_gshard.data.prepared import record
from lingvo_gshard.data.prepared.lengths import Lengths, by_shard
from lingvo_gshard.data.prepared.manifest import Manifest, Shard

_log = logging.getLogger(__name__)

ERROR, SKIP = "error", "skip"
# One thread reads, with a small buffer, since rows are far apart.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_BUFFER_BYTES = 4096
# Systems allow 1,024 open files or more.
_MOST_OPEN = 512


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of a language from one source; their numbers are consecutive.

    Attributes:
      language: the language.
      source: name of the source.
      begin: number of the first row.
      rows: number of rows.
      tokens: source and target tokens of all rows.
    """

    language: str
    source: str
    begin: int
    rows: int
    tokens: tuple[int, int]


class Table:
    """The rows of a split, numbered by language, source and shard.

    Attributes:
      shards: the shards in use, in the order of their rows' numbers.
      groups: the rows of each language and source, in the order of their numbers.
      lengths: source and target tokens of each row.
      damaged: file of a shard -> number of its rows that were asked for and could not be read.
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
          directory: the directory of prepared data.
          manifest: its manifest.
          split: name of the split.
          on_damage: ERROR to refuse shards that cannot be read, SKIP to leave out their rows.
          languages: the languages whose rows are used; empty: all.

        Raises:
          UserError: there is no such split or language, or a file is missing or has another size.
        """
        if split not in manifest.splits:
            raise UserError(
                f"{directory}: the prepared data has no split {split!r}. "
                f"{names.nearest(split, manifest.splits)}"
            )
        self._root = paths.path_of(directory)
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
        """The number of rows."""
        return int(self._starts[-1])

    def read(self, rows: np.ndarray) -> tuple[Tokens, Tokens]:
        """Returns the sources and the targets of rows. Rows that were skipped have no tokens.

        Args:
          rows: int64, numbers of rows in any order.

        Raises:
          UserError: a shard cannot be read. Names the file.
        """
        records: list[bytes] = [b""] * len(rows)
        with self._lock:
            self._fill(records, rows)
        return record.decode(records, self._width)

    def _fill(self, records: list[bytes], rows: np.ndarray) -> None:
        for shard, places in by_shard(rows, self._starts):
            inside = rows[places] - self._starts[shard]
            for place, content in zip(places.tolist(), self._read(shard, inside), strict=True):
                records[place] = content

    def _read(self, number: int, rows: np.ndarray) -> list[bytes]:
        """Returns the records of some rows of a shard."""
        shard, empty = self.shards[number], record.encode((), (), self._width)
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
        path = copies.local_file(self._root / self.shards[number].file)
        return array_record_module.ArrayRecordReader(
            str(path), _READER_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
        )

    def _is_readable(self, shard: Shard) -> bool:
        """Returns whether a shard has the size that the manifest says.

        Raises:
          UserError: it has not, and damage is an error.
        """
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


class GroupNumbers:
    """Maps numbers of rows to a number for each group, like an array indexed by rows."""

    def __init__(self, groups: Sequence[Group], number_of: Callable[[Group], int]):
        """Remembers where groups begin.

        Args:
          groups: the groups in the order of their rows.
          number_of: returns the number of a group.
        """
        self._begins = np.array([group.begin for group in groups], np.int64)
        self._numbers = np.array([number_of(group) for group in groups], np.int32)

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Returns the number of each row's group, int32."""
        return self._numbers[np.searchsorted(self._begins, rows, side="right") - 1]


def _check_languages(languages: Sequence[str], split: str, shards: Sequence[Shard]) -> None:
    found = {shard.language for shard in shards}
    for language in languages:
        if language not in found:
            raise UserError(
                f"input.languages: {split} has no rows of {language!r}. "
                f"{names.nearest(language, found)}"
            )


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
