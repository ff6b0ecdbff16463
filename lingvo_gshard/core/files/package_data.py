"""Files of data that stand beside the package's modules."""

from __future__ import annotations

import pathlib
from typing import TypeVar

import msgspec

T = TypeVar("T")


def text(module: str, name: str) -> str:
    """Returns the text of a file.

    Args:
      module: `__file__` of the module beside it.
      name: the file's name.
    """
    return pathlib.Path(module).with_name(name).read_text(encoding="utf-8")


def table(module: str, name: str, kind: type[T]) -> T:
    """Returns the content of a JSON file, checked.

    Args:
      module: as in `text`.
      name: as in `text`.
      kind: type of the content.
    """
    return msgspec.json.decode(text(module, name), type=kind)
