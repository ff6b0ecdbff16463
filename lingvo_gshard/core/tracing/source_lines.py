"""Finds the line of a model's code that made an operation."""

from __future__ import annotations

import pathlib
import sysconfig
from collections.abc import Iterable

_PACKAGE = pathlib.Path(__file__).parents[2]
# Files that only pass calls on, and files that call the model.
_HELPERS = ("layers/products.py", "layers/lora.py")
_PASSING = (
    *(str(_PACKAGE / name) for name in ("core", "sharding", *_HELPERS)),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib")),
)
_CALLERS = tuple(str(_PACKAGE / name) for name in ("runtime", "training", "profiling"))


def line_of(frames: Iterable[tuple[str, int]]) -> str:
    """Returns the innermost line of a model among the frames of a call stack.

    Args:
      frames: file and line of each frame, the innermost first.

    Returns:
      The file and the line, such as "my_layer.py:12"; "" if no frame belongs to a model.
    """
    for file, line in frames:
        if file.startswith(_CALLERS):
            break
        if not file.startswith(_PASSING):
            return shown(file, line)
    return ""


def shown(file: str, line: int) -> str:
    """Returns a file and a line as reports show them: within the package, or the name alone."""
    path = pathlib.Path(file)
    is_ours = path.is_relative_to(_PACKAGE)
    return f"{path.relative_to(_PACKAGE.parent) if is_ours else path.name}:{line}"
