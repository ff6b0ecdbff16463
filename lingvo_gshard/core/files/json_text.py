"""Decodes the JSON of a file, which may hold anything."""

from __future__ import annotations

from typing import TypeVar

import msgspec

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
