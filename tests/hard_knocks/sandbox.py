"""A directory of its own for each command, and what became of its files."""

from __future__ import annotations

import fnmatch
import hashlib
import pathlib
from collections.abc import Callable, Iterable


class Sandbox:
    """The current directory of one command, and where its streams and caches go.

    Attributes:
      path: the directory.
      runs: returns the directory of a trained run by its name, as `prepare.trained` takes it.
    """

    def __init__(self, root: pathlib.Path, runs: Callable[[str], pathlib.Path]):
        self.path, self.runs, self._root = root / "here", runs, root
        self.path.mkdir()

    def __truediv__(self, name: str) -> pathlib.Path:
        """Returns the path of a file. Its directories are made."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def outside(self, name: str) -> pathlib.Path:
        """Returns the path of a file that is not in the command's directory."""
        return self._root / name

    def files(self) -> dict[str, str]:
        """Returns a digest of each file, by its path; "directory" for a directory."""
        return {
            str(path.relative_to(self.path)): _digest(path) for path in sorted(self.path.rglob("*"))
        }


# Python compiles the modules of the current directory, unless its environment forbids it.
_COMPILED = ("__pycache__*", "*/__pycache__*")


def differences(before: dict[str, str], after: dict[str, str], allowed: Iterable[str]) -> list[str]:
    """Returns the files that were lost, changed or left behind, in words.

    Args:
      before: files with digests.
      after: the same, later.
      allowed: patterns of paths that do not count.
    """
    words = {
        **{path: "lost" for path in before.keys() - after.keys()},
        **{path: "left behind" for path in after.keys() - before.keys()},
        **{p: "changed" for p in before.keys() & after.keys() if before[p] != after[p]},
    }
    return sorted(
        f"{path} was {word}"
        for path, word in words.items()
        if not any(fnmatch.fnmatch(path, pattern) for pattern in (*allowed, *_COMPILED))
    )


def _digest(path: pathlib.Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if not path.is_file():
        return "directory" if path.is_dir() else "special file"
    return hashlib.sha256(path.read_bytes()).hexdigest()
