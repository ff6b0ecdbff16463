"""Lengths: source and target tokens of each row of a split, mapped from the files of its shards."""

from __future__ import annotations

import mmap
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import copies
from lingvo_gshard.data.prepared.manifest import Shard


class Lengths:
    """The lengths of all rows, mapped from files and not held in memory."""

    def __init__(self, root: pathlib.Path, shards: Sequence[Shard]):
        """Maps the files.

        Args:
          root: the directory of prepared data.
          shards: the shards, which number their rows one after another.

        Raises:
          UserError: a file is missing or damaged.
        """
        self._root, self._shards = root, shards
        self._tables = [_mapped(root, shard) for shard in shards]
        self._starts = np.cumsum([0, *(shard.rows for shard in shards)])

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64 [N,2], source and target tokens of rows.

        Args:
          rows: int64 [N], numbers of rows.

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
        """Returns a shard's table. The system kills a process that reads behind a file's end.

        Raises:
          UserError: the file was cut off since it was mapped.
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

    Args:
      rows: numbers of rows.
      starts: number of the first row of each shard, and of the row after the last.
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
        table = np.load(copies.local_file(path), mmap_mode="r")
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
