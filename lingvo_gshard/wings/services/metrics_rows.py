"""Reads the rows of a run's metrics.jsonl."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator

import msgspec

from lingvo_gshard.core import LONGEST_LINE, bounded_lines, regular
from lingvo_gshard.training import METRICS_FILE, MetricsRow, is_row_until

# The last rows are looked for in this many bytes at the end of the file.
_TAIL = 1 << 18


def rows_of_run(logdir: pathlib.Path) -> list[MetricsRow]:
    """Returns the rows of a run's metrics.jsonl: each has `step` and the metrics of that step.

    There are none if the file is missing. A row that is still being written is left out.
    """
    rows = rows_until(logdir / METRICS_FILE, sys.maxsize)
    return [{"step": step, **row} for step, row in rows]


def first_and_last(path: pathlib.Path, step: int, count: int) -> list[tuple[int, MetricsRow]]:
    """Returns the steps and rows of a run's first step and of its last ones, up to `step`.

    The file may be missing or damaged. At most `count` last rows are read, from its last megabytes.
    """
    try:
        with regular.open_regular(path) as file:
            first = file.readline(LONGEST_LINE)
            file.seek(max(file.tell(), path.stat().st_size - _TAIL))
            rest = file.read().splitlines(keepends=True)
    except OSError:
        return []
    kept = [line for line in rest if is_row_until(line, step)][-count:]
    rows = [msgspec.json.decode(line) for line in [first, *kept] if is_row_until(line, step)]
    return [(row.pop("step"), row) for row in rows]


def rows_until(path: pathlib.Path, step: int) -> Iterator[tuple[int, MetricsRow]]:
    """Yields steps and rows up to a step from a file of metrics; it may be missing or damaged."""
    with contextlib.suppress(OSError), regular.open_regular(path) as file:
        regular.require_regular(path, regular.MOST_BYTES)
        for line in bounded_lines(file):
            if line is not None and is_row_until(line + b"\n", step):
                row = msgspec.json.decode(line)
                yield row.pop("step"), row
