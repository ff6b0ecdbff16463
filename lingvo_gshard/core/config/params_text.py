"""Parses Params from their text form, so that a log directory describes its run by itself."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.core.errors import UserError, explained
from lingvo_gshard.core.files import objects
from lingvo_gshard.core.seams import Seam

# (path, value, number of the line).
Line: TypeAlias = tuple[str, str, int]


def to_json(params: Params) -> str:
    """Returns Params as a JSON object.

    Each node is an object with its class, by dotted path, as `cls` and its hyperparameters by name.
    Classes and functions are given by their dotted paths.
    """
    return msgspec.json.format(msgspec.json.encode(_value(params)), indent=1).decode() + "\n"


def _value(value: Any) -> Any:
    """Returns a hyperparameter as JSON values."""
    if isinstance(value, Params):
        node = {"cls": _value(value.cls)}
        return node | {name: _value(child) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value(element) for element in value]
    if isinstance(value, dict):
        return {str(key): _value(element) for key, element in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


@dataclasses.dataclass(frozen=True)
class Renames:
    """Reads names of earlier versions, so that their runs can be read.

    Attributes:
      path: returns what a path of Params is called today; other paths as they are.
      class_name: returns what the dotted name of a class is today; other names as they are.
      lines: returns (path, value, number of the line) of the lines of a params.txt, as today's
        version would have written them.
      last_path: returns the path in the last line of an earlier version's params.txt, or None.
    """

    path: Callable[[str], str]
    class_name: Callable[[str], str]
    lines: Callable[[list[Line]], list[Line]]
    last_path: Callable[[str], str | None]


RENAMES: Seam[Renames] = Seam("renames")


def path_today(path: str) -> str:
    """Returns today's name for a path of Params of an earlier version."""
    for renames in RENAMES:
        path = renames.path(path)
    return path


def class_today(name: str) -> str:
    """Returns today's dotted name for a class of an earlier version; other names as they are."""
    for renames in RENAMES:
        name = renames.class_name(name)
    return name


def last_path(text: str) -> str | None:
    """Returns the path that the last line of an earlier version's params.txt has.

    None for a text of today's version.
    """
    return next(filter(None, (renames.last_path(text) for renames in RENAMES)), None)


# One line: a path and a value.
_LONGEST_PATH = 4096
_LINE = re.compile(r"[A-Za-z_][\w.\[\]]* : ")
# Characters of a wrong value that messages show.
_SHOWN = 200
# The name of a class or function, with its module.
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def experiment_from_text(text: str) -> Params:
    """Returns an experiment's Params from the text that `Params.to_text` wrote.

    Hyperparameters that the text lacks keep their defaults. Names of earlier versions are known.

    Raises:
      UserError: a line is not `path : value`, its path, class or value is unknown, or it names a
        class of a module that the user has not named. Names the number of the line, or the modules.
    """
    root = Experiment.params().locate()
    lines: list[Line] = []
    for number, line in enumerate(text.splitlines(), 1):
        path, separator, value = line.partition(" : ")
        if not separator:
            raise UserError(f"line {number}: {line!r} is not 'path : value'")
        lines.append((path, value, number))
    for renames in RENAMES:
        lines = renames.lines(lines)
    _check_modules(value for _, value, _ in lines)
    # A class creates its node with default children, which deeper lines replace or fill.
    for path, value, number in sorted(lines, key=_classes_first):
        with explained(f"line {number}: {path}", ValueError):
            _apply(root, path, value, len(lines))
    return root.locate()


def _check_modules(values: Iterable[str]) -> None:
    """Checks that values name no class of a module that must not be imported."""
    names = {value.partition(".")[0] for value in values if _DOTTED.fullmatch(value)}
    foreign = sorted(name for name in names if not registry.is_trusted(name))
    if foreign:
        raise UserError(
            f"the Params name classes of {' and '.join(foreign)}, which is code of its own. If you "
            f"trust it, add `import={','.join(foreign)}`"
        )


def is_params_text(path: str | os.PathLike) -> bool:
    """Returns whether a file is the params.txt of a run and not gin, by its first line."""
    try:
        with objects.open_to_read(path) as file:
            return _LINE.match(file.readline(_LONGEST_PATH).decode("utf-8", "replace")) is not None
    except OSError:
        return False


def read(path: str | os.PathLike) -> Params:
    """Returns the Params in the params.txt of a run. Raises ValueError naming the file and line."""
    with explained(os.fspath(path), ValueError):
        return experiment_from_text(objects.read_text(path))


def _classes_first(line: tuple[str, str, int]) -> tuple:
    path, _, number = line
    return (not path.endswith(".cls"), path.count("."), number)


def _apply(root: Params, path: str, value: str, count: int) -> None:
    """Sets the value of one of `count` lines."""
    if not path.endswith(".cls"):
        root.set_path(path, _parse(value))
        return
    path, cls = path.removesuffix(".cls"), _parse(value)
    element = re.fullmatch(r"(.*)\[(\d+)\]", path)
    if element:
        _grow(root, element.group(1), int(element.group(2)), count)
    node = root.get(path)
    if cls is None or (isinstance(node, Params) and node.cls is cls):
        return
    if not (isinstance(cls, type) and issubclass(cls, Configurable)):
        raise UserError(f"{value} is no configurable class, which has Params")
    root.set_path(path, cls.params())


def _grow(root: Params, path: str, index: int, count: int) -> None:
    """Extends the list at `path` so that it has element `index`; each element has a line."""
    if index >= count:
        raise UserError(f"element {index} of a list was not expected in a file of {count} lines")
    values = root.get(path)
    values = list(values) if isinstance(values, (list, tuple)) else []
    root.set_path(path, values + [None] * (index + 1 - len(values)))


def _parse(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if not _DOTTED.fullmatch(text):
        raise UserError(
            f"{text[:_SHOWN]!r} is neither a literal nor the name of a class or function"
        )
    return registry.defined(text)
