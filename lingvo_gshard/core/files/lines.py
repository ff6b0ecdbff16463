"""Reads the lines of a file, or of a part of it, in bounded memory, however long a line is."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, cast

# A small compressed file may be one line of many gigabytes.
LONGEST_LINE = 1 << 24
_LINES_AT_ONCE = 1 << 20


def bounded_lines(
    file: IO[bytes], count: int | None = None, longest: int = LONGEST_LINE
) -> Iterator[bytes | None]:
    """Yields the lines of a file from its position, without line ends; None for a long one.

    Args:
      count: number of bytes to read. The last byte must end a line. None reads to the file's end.
      longest: largest number of bytes of a line. At most one block of a longer line is in memory.
    """
    rest, is_long = b"", False
    # `read` would lose what comes before the place where a compressed file is damaged.
    while block := cast(io.BufferedIOBase, file).read1(
        _LINES_AT_ONCE if count is None else min(_LINES_AT_ONCE, count)
    ):
        if count is not None:
            count -= len(block)
        lines: list[bytes | None] = [*block.split(b"\n")]
        if is_long and len(lines) == 1:
            continue
        if is_long:
            # The end of a line whose beginning was too long.
            lines[0], is_long = None, False
        else:
            lines[0] = (rest or b"") + (lines[0] or b"")
        rest = lines.pop()
        yield from _without_long(lines, longest)
        if rest is None or len(rest) > longest:
            rest, is_long = b"", True
    if is_long:
        yield None
    elif rest:
        yield rest


def _without_long(lines: list[bytes | None], longest: int) -> list[bytes | None]:
    if max((len(line) for line in lines if line is not None), default=0) <= longest:
        return lines
    return [line if line is not None and len(line) <= longest else None for line in lines]
