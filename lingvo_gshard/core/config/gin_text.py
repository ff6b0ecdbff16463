"""Writes Params as gin, with the meaning of each hyperparameter; `gin_binding` reads it back."""

from __future__ import annotations

import fnmatch
import inspect
import textwrap
from typing import Any

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.gin_binding import gin_name
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError

_WIDTH = 98


def to_gin(params: Params, pattern: str = "") -> str:
    """Returns the hyperparameters of a tree as gin settings, each below its meaning.

    Args:
      params: The tree.
      pattern: Part of the paths to write, such as "dropout", or a pattern with wildcards for whole
        paths, such as "trainer.*". Empty writes all.

    Raises:
      UserError: No path matches. The message has the nearest names.
    """
    settings = [setting for setting in _settings(params) if _matches(setting[0], pattern)]
    if not settings:
        ends = {path.rpartition(".")[2] for path, _, _ in _settings(params)}
        raise UserError(
            f"`params={pattern}`: no hyperparameter matches. {names.nearest(pattern, ends)}"
        )
    return "\n".join(f"{_comment(meaning)}{path} = {value}\n" for path, value, meaning in settings)


def _matches(path: str, pattern: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(path, pattern)
    return pattern.lower() in path.lower()


def _settings(root: Params) -> list[tuple[str, str, str]]:
    """Returns (path, value, meaning) of each value, and of each class that can be replaced."""
    settings = []
    for path, node in root.nodes():
        name = gin_name(path)
        if path and node.cls is not None:
            meaning = (inspect.getdoc(node.cls) or "").partition("\n")[0]
            settings.append((name, _literal(node.cls), meaning))
        for child, value in node.items():
            if not _holds_params(value):
                full = f"{name}.{child}".lstrip(".")
                settings.append((full, _literal(value), _meaning(node, child)))
    return settings


def _holds_params(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_params(element) for element in value)
    return isinstance(value, Params)


def _meaning(node: Params, name: str) -> str:
    """Returns the help of a hyperparameter, its range, and its default if it has another value."""
    parts = [node.help(name)]
    limits = node.constraint(name).range()
    if limits:
        parts.append(f"A number {limits}.")
    value, default = getattr(node, name), node.default(name)
    if not _holds_params(default) and value != default:
        owner = node.cls.__name__ if node.cls else "the class"
        parts.append(f"Default of {owner}: {_literal(default)}.")
    return " ".join(parts)


def _comment(text: str) -> str:
    lines = textwrap.wrap(" ".join(text.split()), _WIDTH)
    return "".join(f"# {line}\n" for line in lines)


def _literal(value: Any) -> str:
    """Returns a value as gin: a reference for a class or function."""
    if hasattr(value, "__qualname__"):
        return f"@{value.__module__}.{value.__qualname__}"
    return repr(value)
