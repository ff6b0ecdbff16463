"""Finds the test files that belong to files of the repository.

A test file names the files that it tests in its first lines:

    # tests: layers/moe/routing.py, layers/moe/capacity.py
    # tests: /docs/moe.md

Paths are relative to the package, or to the repository if they begin with a slash. A path that ends
with a slash is a folder with everything below it. A test file without such lines tests the file
whose name it bears: tests/layers/moe/test_routing.py tests layers/moe/routing.py.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import subprocess
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "lingvo_gshard"
_MARK = "# tests: "


class Belonging:
    """The test files of a repository, with the files that they test.

    Attributes:
      root: the repository.
      tested: path of each test file -> paths of the files and folders that it tests. All paths are
        relative to the repository, and those of folders end with a slash.
    """

    def __init__(self, root: pathlib.Path = ROOT):
        self.root = root
        tests = sorted((root / "tests").rglob("test_*.py"))
        self.tested = {self._relative(path): self._tested(path) for path in tests}

    def tests_of(self, paths: Iterable[str]) -> dict[str, list[str]]:
        """Returns the test files that belong to each of some files or folders.

        A helper of the tests belongs to the test files that import it, and a conftest.py or a file
        of data to all test files of its folder.

        Args:
          paths: paths relative to the repository.
        """
        return {path: sorted(self._tests_of(path)) for path in paths}

    def named(self, test: str) -> str | None:
        """Returns the path of the only file that a test file bears the name of.

        Either the file is in the same folder of the package or of its wings, or no other file of
        the same top-level folder has the name.
        """
        _, *folders, name = pathlib.PurePath(test).parts
        name = name.removeprefix("test_")
        for place in (self.root / PACKAGE / "wings", self.root / PACKAGE):
            if folders and (place / folders[0]).is_dir():
                same = pathlib.Path(place, *folders, name)
                found = [same] if same.is_file() else list((place / folders[0]).rglob(name))
                return self._relative(found[0]) if len(found) == 1 else None
        return None

    def lines(self, test: str) -> list[str]:
        """Returns the paths that the first lines of a test file name, relative to the root."""
        found = []
        for line in (self.root / test).read_text("utf-8").splitlines():
            if not line.startswith(_MARK):
                break
            found += [each.strip() for each in line.removeprefix(_MARK).split(",")]
        return [each[1:] if each.startswith("/") else f"{PACKAGE}/{each}" for each in found]

    def _tested(self, path: pathlib.Path) -> list[str]:
        test = self._relative(path)
        if named := self.lines(test):
            return named
        file = self.named(test)
        return [file] if file else []

    def _tests_of(self, path: str) -> set[str]:
        if (self.root / path).is_dir():
            path = path.rstrip("/") + "/"
        found = {t for t, tested in self.tested.items() if any(_meet(path, p) for p in tested)}
        found |= {t for t in self.tested if _meet(path, t)}
        if path.startswith("tests/") and not path.endswith("/"):
            found |= self._importing(path)
            if path.endswith("conftest.py") or not path.endswith(".py"):
                folder = path.rpartition("/")[0] + "/"
                found |= {t for t in self.tested if t.startswith(folder)}
        return found

    def _importing(self, helper: str) -> set[str]:
        """Returns the test files that use a file of tests/, or another file of tests/ that does."""
        found: set[str] = set()
        pending = [helper]
        while pending:
            module = _module(pending.pop())
            new = {file for file, modules in self._uses.items() if module in modules} - found
            found |= new
            pending += new
        return found & set(self.tested)

    @functools.cached_property
    def _uses(self) -> dict[str, set[str]]:
        """The modules of tests/ that each file of tests/ imports, or runs by `python -m`."""
        found = {}
        for path in (self.root / "tests").rglob("*.py"):
            modules = found[self._relative(path)] = set()
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom):
                    modules.update({node.module, *(f"{node.module}.{a.name}" for a in node.names)})
                elif isinstance(node, ast.Import):
                    modules.update(alias.name for alias in node.names)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    modules.add(node.value)
        return found

    def _relative(self, path: pathlib.Path) -> str:
        return path.relative_to(self.root).as_posix()


def changed_since(revision: str, root: pathlib.Path = ROOT) -> list[str]:
    """Returns the files that differ from a revision, and those that git does not know.

    Files that are gone are left out.

    Raises:
      ValueError: git knows no such revision.
    """
    found: set[str] = set()
    for command in (
        ["diff", "--name-only", "--no-renames", "-z", revision, "--"],
        ["ls-files", "--others", "--exclude-standard", "-z"],
    ):
        ended = subprocess.run(
            ["git", *command], cwd=root, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise ValueError(ended.stderr.strip())
        found.update(ended.stdout.split("\0"))
    return sorted(path for path in found if path and (root / path).is_file())


def _meet(one: str, other: str) -> bool:
    """Returns whether two paths are equal, or one is a folder with the other in it."""
    return (
        one == other
        or (one.endswith("/") and other.startswith(one))
        or (other.endswith("/") and one.startswith(other))
    )


def _module(path: str) -> str:
    parts = pathlib.PurePath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] in ("__init__", "__main__") else parts)
