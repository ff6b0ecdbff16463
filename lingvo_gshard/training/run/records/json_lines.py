"""Files with one JSON object per line, to which rows are appended."""

from __future__ import annotations

import contextlib
import pathlib
from typing import TypeVar

import msgspec

from lingvo_gshard.core.files.cell import Cell
from lingvo_gshard.core.files.paths import is_bucket

_Row = TypeVar("_Row")


def append(path: pathlib.Path, row: object) -> None:
    """Appends a row to a local file or one in a bucket. Raises OSError if it cannot be written."""
    line = msgspec.json.encode(row) + b"\n"
    if is_bucket(path):
        Cell(path).append(line)
        return
    with open(path, "ab") as file:
        file.write(line)


def read(path: pathlib.Path, row: type[_Row]) -> list[_Row]:
    """Returns the rows of a file, which may be missing. Damaged rows are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    decoder, found = msgspec.json.Decoder(row), []
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            found.append(decoder.decode(line))
    return found
