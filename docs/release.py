"""Makes a release: dates its section of the changelog, sets the version, builds, checks and tags.

    make release VERSION=0.2.0

The tree must be clean. "Unreleased" of CHANGELOG.md becomes the section of the version, and
version.py, CITATION.cff and docs/install.md get the version. The sdist and the wheel of exactly
these files are built into dist/ and checked. Then the change is committed and tagged. Nothing is
pushed: the last lines say how. If a check fails, all files are as before.

If CHANGELOG.md already has the section and no tag has the version, that section is released.
"""

from __future__ import annotations

import datetime
import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).resolve().parents[1]
UNRELEASED = "## Unreleased"
_VERSION = re.compile(r"\d+\.\d+\.\d+")
# Files that name the version, and where they do. `{}` stands for a version.
PLACES = {
    "lingvo_gshard/core/version.py": ('VERSION = "{}"',),
    "CITATION.cff": ("version: {}\n",),
    "docs/install.md": ("lingvo_gshard-{}-py3", "@v{}'"),
}


def main(arguments: list[str]) -> int:
    """Makes the release of the version that is the only argument. Returns the exit code."""
    if len(arguments) != 1:
        print(__doc__)
        return 2
    (version,) = arguments
    try:
        release(version, datetime.date.today())
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


class ReleaseError(Exception):
    """A release that cannot be made, in a sentence."""


def release(version: str, date: datetime.date) -> None:
    """Makes a release of this repository.

    Raises:
      ReleaseError: the tree, the version or the changelog is not ready, or a check fails.
    """
    tag, before = f"v{version}", current_version()
    check_ready(version, before)
    changelog = _text("CHANGELOG.md")
    try:
        if f"\n## {version} - " not in changelog:
            _write("CHANGELOG.md", dated(changelog, version, date))
        for path, text in with_version(before, version).items():
            _write(path, text)
        _git("add", "CHANGELOG.md", *PLACES)
        files = build_and_check(version)
        has_changes = bool(_git("status", "--porcelain"))
        if has_changes:
            _git("commit", "--quiet", f"--message=Release {version}")
    except BaseException:
        _git("restore", "--staged", "--worktree", "CHANGELOG.md", *PLACES)
        raise
    _git("tag", "--annotate", tag, f"--message=Release {version}")
    branch = _git("branch", "--show-current") or "HEAD"
    undo = f"git tag --delete {tag}" + (" && git reset --hard HEAD~1" if has_changes else "")
    print(f"Built and checked in dist/: {', '.join(path.name for path in files)}")
    print(f"Tagged {tag}. To publish it:\n\n  git push origin {branch} {tag}\n")
    print("The workflow `release` then builds the files again and sends them to the index.")
    print(f"To undo the release before: {undo}")


def current_version() -> str:
    """Returns the version of version.py; ReleaseError if it has none."""
    found = re.search(r'^VERSION = "(.+)"$', _text("lingvo_gshard/core/version.py"), re.MULTILINE)
    if not found:
        raise ReleaseError("lingvo_gshard/core/version.py has no line VERSION = ...")
    return found[1]


def check_ready(version: str, before: str) -> None:
    """Raises ReleaseError if the version is none to release now, or the tree has changes."""
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"VERSION={version}: expected three numbers, such as 0.2.0")
    as_numbers = [tuple(map(int, each.split("."))) for each in (version, before)]
    if as_numbers[0] < as_numbers[1]:
        raise ReleaseError(f"VERSION={version} is before {before}, the version of the tree")
    if _git("tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists; choose a version after {before}")
    changes = _git("status", "--porcelain")
    if changes:
        raise ReleaseError(f"the tree has changes; commit or stash them first:\n{changes}")


def dated(changelog: str, version: str, date: datetime.date) -> str:
    """Returns a changelog whose unreleased notes are those of a version.

    Raises:
      ReleaseError: there are no such notes.
    """
    before, heading, after = changelog.partition(f"{UNRELEASED}\n")
    if not heading or not re.match(r"\s*(?!## )\S", after):
        raise ReleaseError(f"CHANGELOG.md has no notes below {UNRELEASED!r}; what would be new?")
    return f"{before}{heading}\n## {version} - {date.isoformat()}\n{after}"


def with_version(before: str, version: str) -> dict[str, str]:
    """Returns the text of each file that names the version, with another version.

    Raises:
      ReleaseError: a file does not name the version where it should.
    """
    found = {}
    for path, patterns in PLACES.items():
        found[path] = _text(path)
        for old, new in ((each.format(before), each.format(version)) for each in patterns):
            if old not in found[path]:
                raise ReleaseError(f"{path} has no {old.strip()!r}; its version is not {before}")
            found[path] = found[path].replace(old, new)
    return found


def build_and_check(version: str) -> list[pathlib.Path]:
    """Builds the files of git's index into dist/ and returns the sdist and the wheel.

    Raises:
      ReleaseError: they cannot be built, or do not pass the checks.
    """
    dist = ROOT / "dist"
    with tempfile.TemporaryDirectory() as work:
        tree = pathlib.Path(work) / "tree"
        _git("checkout-index", "--all", f"--prefix={tree}/")
        build = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={dist}", str(tree)]
        _run(build, "the package cannot be built")
        names = f"lingvo_gshard-{version}.tar.gz", f"lingvo_gshard-{version}-py3-none-any.whl"
        files = [dist / name for name in names]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise ReleaseError(f"the build made no {' and no '.join(missing)}")
        if importlib.util.find_spec("twine"):
            check = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
            _run(check, "twine refuses the files")
        _check_wheel(files[1], version, pathlib.Path(work) / "venv")
    return files


def _check_wheel(wheel: pathlib.Path, version: str, environment: pathlib.Path) -> None:
    """Installs a wheel alone and asks it for its version; ReleaseError if that is another one."""
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    _run(install, "the wheel cannot be installed")
    code = (
        "import importlib.metadata as m, lingvo_gshard.core.version as v;"
        "print(m.version('lingvo_gshard'), v.VERSION)"
    )
    found = _run([python, "-I", "-c", code], "the installed wheel cannot be imported")
    if found.split() != [version] * 2:
        raise ReleaseError(f"the installed wheel says that it is {found.strip()}, not {version}")
    if not (environment / "bin" / "gshard-train").is_file():
        raise ReleaseError("the installed wheel brings no command gshard-train")


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _write(path: str, text: str) -> None:
    (ROOT / path).write_text(text, encoding="utf-8")


def _git(*arguments: str) -> str:
    return _run(["git", *arguments], f"git {arguments[0]} fails").strip()


def _run(command: list[str], problem: str) -> str:
    """Returns the standard output of a command in the repository; ReleaseError if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{problem}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
