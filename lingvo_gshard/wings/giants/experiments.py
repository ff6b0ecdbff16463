"""Registers the experiments that TOML files beside this one describe.

A table is an experiment. `about` is its description, and `like` names experiments whose settings it
takes over. All else are paths of Params and their values. A path that ends in `cls` names a class,
which replaces the settings below that path. Tables without `about` only serve others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_gshard.core import Params, objects, params_text, registry

_Tables = dict[str, dict[str, Any]]
_FILES = ("gshard_paper", "language_models", "studies", "translation")


@functools.cache
def _tables() -> _Tables:
    return {
        name: table
        for file in _FILES
        for name, table in objects.table_beside(__file__, f"{file}.toml", _Tables).items()
    }


def _lines(name: str) -> dict[str, str]:
    """Returns path -> value of an experiment, both as params.txt has them."""
    if name not in _tables():
        text = registry.get(name).to_text()
        return dict(line.split(" : ", 1) for line in text.splitlines())
    table = dict(_tables()[name])
    table.pop("about", None)
    found: dict[str, str] = {}
    for lines in (*map(_lines, table.pop("like", ())), dict(_leaves(table))):
        replaced = tuple(path.removesuffix("cls") for path in lines if path.endswith(".cls"))
        found = {path: value for path, value in found.items() if not path.startswith(replaced)}
        found |= lines
    return found


def _leaves(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.")
        elif name == "cls":
            yield path + name, value
        else:
            yield path + name, repr(tuple(value) if isinstance(value, list) else value)


def _register(name: str, about: str) -> None:
    def experiment() -> Params:
        lines = _lines(name)
        text = "\n".join(f"{path} : {value}" for path, value in lines.items())
        return params_text.experiment_from_text(text)

    experiment.__doc__ = about
    registry.register(name)(experiment)


for _name, _table in _tables().items():
    if "about" in _table:
        _register(_name, _table["about"])
