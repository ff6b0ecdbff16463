"""Parses Params from their text form, so that a log directory describes its run by itself."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from typing import Any

from lingvo_gshard.core.config import renamed, user_modules
from lingvo_gshard.core.config.experiment import Experiment
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError

# One line: a path and a value.
_LINE = re.compile(r"[A-Za-z_][\w.\[\]]* : ")
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
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        path, separator, value = line.partition(" : ")
        if not separator:
            raise UserError(f"line {number}: {line!r} is not 'path : value'")
        lines.append((path, value, number))
    lines = renamed.lines_today(lines)
    _check_modules(value for _, value, _ in lines)
    # A class creates its node with default children, which deeper lines replace or fill.
    for path, value, number in sorted(lines, key=_classes_first):
        try:
            _apply(root, path, value)
        except (ValueError, ImportError, AttributeError) as error:
            raise UserError(f"line {number}: {path}: {error}") from None
    return root.locate()


def _check_modules(values: Iterable[str]) -> None:
    """Checks that values name no class of a module that must not be imported."""
    names = {value.partition(".")[0] for value in values if _DOTTED.fullmatch(value)}
    foreign = sorted(name for name in names if not user_modules.is_trusted(name))
    if foreign:
        raise UserError(
            f"the Params name classes of {' and '.join(foreign)}, which is code of its own. If you "
            f"trust it, add `import={','.join(foreign)}`"
        )


def is_params_text(path: str | os.PathLike) -> bool:
    """Returns whether a file is the params.txt of a run and not gin, by its first line."""
    try:
        with open(path, encoding="utf-8") as file:
            return _LINE.match(file.readline()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def read(path: str | os.PathLike) -> Params:
    """Returns the Params in the params.txt of a run. Raises ValueError naming the file and line."""
    try:
        with open(path, encoding="utf-8") as file:
            return experiment_from_text(file.read())
    except ValueError as error:
        raise UserError(f"{os.fspath(path)}: {error}") from None


def _classes_first(line: tuple[str, str, int]) -> tuple:
    path, _, number = line
    return (not path.endswith(".cls"), path.count("."), number)


def _apply(root: Params, path: str, value: str) -> None:
    if not path.endswith(".cls"):
        root.set_path(path, _parse(value))
        return
    path, cls = path.removesuffix(".cls"), _parse(value)
    element = re.fullmatch(r"(.*)\[(\d+)\]", path)
    if element:
        _grow(root, element.group(1), int(element.group(2)))
    node = root.get(path)
    if cls is not None and not (isinstance(node, Params) and node.cls is cls):
        root.set_path(path, cls.params())


def _grow(root: Params, path: str, index: int) -> None:
    """Extends the list at `path` so that it has element `index`."""
    values = root.get(path)
    values = list(values) if isinstance(values, (list, tuple)) else []
    root.set_path(path, values + [None] * (index + 1 - len(values)))


def _parse(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if not _DOTTED.fullmatch(text):
        raise UserError(f"{text!r} is neither a literal nor the name of a class or function")
    parts = text.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found: Any = user_modules.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise ImportError(
        f"{text!r} cannot be imported; the module {parts[0]} must be installed, in the current "
        "directory or on PYTHONPATH"
    )
