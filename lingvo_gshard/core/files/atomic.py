"""Writes local files atomically."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any, TypeVar

import msgspec

# Ends the names of files that `replace_file` has not finished.
NEW = ".new"


def write_atomically(path: str, content: bytes) -> None:
    """Writes a file so that other processes see all of it or none of it.

    A file that is not a regular one, such as /dev/stdout or a named pipe, is written to directly.

    Raises:
      OSError: the file cannot be written, or its directory does not exist.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:
            file.write(content)
        return
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".partial-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Replaces a file's content; at any time the file has the old or the new one.

    It does not wait for the disk as `write_atomically` does: a loss of power may undo it.

    Raises:
      OSError: the file cannot be written.
    """
    new = path.with_name(path.name + NEW)
    new.write_bytes(content)
    os.replace(new, path)


def loads(content: bytes | str) -> Any:
    """Returns JSON as plain values. Unlike `decode` it reads NaN and whatever else Python writes.

    Raises:
      ValueError: the content is no UTF-8 or no JSON, or is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


_Type = TypeVar("_Type")


def decode(content: bytes, type: type[_Type]) -> _Type:
    """Returns JSON as a value of a type.

    Raises:
      msgspec.DecodeError: the content is no UTF-8, no JSON, nested too deeply, or of another type.
        msgspec itself raises errors of other types for the first and the third.
    """
    try:
        return msgspec.json.decode(content, type=type)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"byte {error.start} of a text is not UTF-8") from None
    except RecursionError:
        raise msgspec.DecodeError("the JSON is nested too deeply") from None
