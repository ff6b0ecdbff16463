"""Measures the line between the heart of the package and its wings.

`docs/wings.txt` has a line for each wing: its name, and a regular expression over the paths of its
files in the package. The heart is every file that no line matches. Imports within functions, and
for types alone, count like others.

A folder of the heart offers names, by a stub `__init__.pyi` whose names are imported when they are
first used, or by `__all__` in `__init__.py`. They are public: wings import them from there.
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
# Stands for libraries that are slow to import; they are no names of the heart.
LIBRARIES = "core.lazy"


@dataclasses.dataclass(frozen=True, order=True)
class Import:
    """One name that a file imports from another file of the package.

    Attributes:
      source: the importing file, relative to the package.
      target: the module, by its dotted name.
      name: the name within the module; empty for the module itself.
      is_public: whether a public module offers it, and the file imports it from there.
    """

    source: str
    target: str
    name: str
    is_public: bool = False


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
        self._offers = {
            module: dict(self._offered_by(module))
            for module, room in self._rooms.items()
            if room == HEART
            and module.count(".") == 1
            and self._paths[module].name == "__init__.py"
        }

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

    @functools.cached_property
    def offered(self) -> set[tuple[str, str]]:
        """Names that the folders of the heart offer, each with the module that defines it."""
        return {found for offers in self._offers.values() for found in offers.values()}

    def taken(self, wing: str = "") -> list[Import]:
        """Returns the imports of the heart in a wing; by default in all wings."""
        return [
            i
            for i, source in self._crossings
            if self._rooms[i.target] == HEART
            and wing in ("", source)
            and i.target != f"{self._package.name}.{LIBRARIES}"
        ]

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
                if name in self._offers.get(target, ()):
                    yield Import(source, *self._offers[target][name], is_public=True)
                elif f"{target}.{name}" in self._paths:
                    yield Import(source, f"{target}.{name}", "")
                elif target in self._paths:
                    yield Import(source, target, name)

    def _offered_by(self, module: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yields the names that a folder offers, each with the module and name behind it."""
        path = self._paths[module]
        stub = path.with_suffix(".pyi")
        tree = ast.parse((stub if stub.exists() else path).read_text(encoding="utf-8"))
        origins = dict(self._origins(tree, module))
        for name in _all_of(tree) if not stub.exists() else origins:
            yield name, origins.get(name, (module, name))

    def _origins(self, tree: ast.Module, package: str) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yields the names that a file imports from the package at its top."""
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                source = ".".join(filter(None, [package * bool(node.level), node.module]))
                for alias in node.names:
                    inner = f"{source}.{alias.name}"
                    if node.level and inner in self._paths:
                        yield alias.name, (inner, "")
                    elif source in self._paths:
                        yield alias.name, (source, alias.name)

    def _room_of(self, path: pathlib.Path) -> str:
        relative = path.relative_to(self._package).as_posix()
        found = (name for name, pattern in self._wings.items() if pattern.search(relative))
        return next(found, HEART)


def _module(path: pathlib.Path, package: pathlib.Path) -> str:
    """Returns the dotted name of a file of a package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _all_of(tree: ast.Module) -> list[str]:
    """Returns what a module lists as `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []
