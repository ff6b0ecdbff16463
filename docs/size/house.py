"""Measures the line between the heart of the package and its wings.

`docs/wings.txt` has a line for each wing: its name, and a regular expression over the paths of its
files in the package. The heart is every file that no line matches. Imports within functions, and
for types alone, count like others.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator

from docs.size.count import Size, size_of

WINGS = pathlib.Path(__file__).parents[1] / "wings.txt"
HEART = "heart"


@dataclasses.dataclass(frozen=True, order=True)
class Import:
    """One name that a file imports from another file of the package.

    Attributes:
      source: the importing file, relative to the package.
      target: the module, by its dotted name.
      name: the name within the module; empty for the module itself.
    """

    source: str
    target: str
    name: str


class House:
    """The files of a package, each in the heart or in a wing."""

    def __init__(self, package: pathlib.Path, wings: str):
        """Reads the package.

        Args:
          package: the folder of the package.
          wings: lines `<name> <regular expression>`; empty lines are skipped.
        """
        pairs = [line.split(None, 1) for line in wings.splitlines() if line.strip()]
        self._wings = {name: re.compile(pattern.strip()) for name, pattern in pairs}
        self._package = package
        self._paths = {_module(path, package): path for path in sorted(package.rglob("*.py"))}
        self._rooms = {module: self._room_of(path) for module, path in self._paths.items()}

    def sizes(self) -> list[Size]:
        """Returns the size of the heart, then of each wing."""
        return [
            size_of(room, [self._paths[m] for m, own in self._rooms.items() if own == room])
            for room in (HEART, *self._wings)
        ]

    @functools.cached_property
    def breaches(self) -> list[Import]:
        """Imports of wings in the heart."""
        return [i for i, source in self._crossings if source == HEART]

    def taken(self, wing: str = "") -> set[tuple[str, str]]:
        """Returns the modules and names of the heart that a wing imports; by default all wings."""
        return {
            (i.target, i.name)
            for i, source in self._crossings
            if self._rooms[i.target] == HEART and wing in ("", source)
        }

    @functools.cached_property
    def _crossings(self) -> list[tuple[Import, str]]:
        """Imports from one room into another, with the room of the importing file."""
        root = self._package.name
        return [
            (found, self._rooms[module])
            for module in self._paths
            for found in self._imports(module)
            if found.target != root and self._rooms[module] != self._rooms[found.target]
        ]

    def _imports(self, module: str) -> Iterator[Import]:
        path = self._paths[module]
        source = path.relative_to(self._package).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [(node.module, alias.name) for alias in node.names]
            else:
                continue
            for target, name in names:
                if f"{target}.{name}" in self._paths:
                    yield Import(source, f"{target}.{name}", "")
                elif target in self._paths:
                    yield Import(source, target, name)

    def _room_of(self, path: pathlib.Path) -> str:
        relative = path.relative_to(self._package).as_posix()
        found = (name for name, pattern in self._wings.items() if pattern.search(relative))
        return next(found, HEART)


def _module(path: pathlib.Path, package: pathlib.Path) -> str:
    """Returns the dotted name of a file of a package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
