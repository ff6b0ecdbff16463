"""Counts the files and lines of folders, and the files that a training step executes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable

# A program that trains, and writes which files of the package were imported and executed, and which
# of them while the training step was traced.
_TRACED = """
import inspect, json, sys, threading
package, logdir, path = sys.argv[1:4]
executed, in_step, depth = set(), set(), threading.local()

def profile(frame, event, _):
    file, is_function = frame.f_code.co_filename, frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if event not in ("call", "return") or not file.startswith(package) or not is_function:
        return
    is_step = frame.f_code.co_name == "train_step" and file.endswith("step/trainer.py")
    now = getattr(depth, "steps", 0)
    if event == "call":
        depth.steps = now + is_step
        executed.add(file)
        if depth.steps:
            in_step.add(file)
    else:
        depth.steps = now - is_step

# Modules and classes define functions when they are imported: their own code is not executed work.
from lingvo_gshard.tools import train
threading.setprofile(profile)
sys.setprofile(profile)
code = train.main(["gshard-train", "--experiment=translation.quickstart", f"--logdir={logdir}",
    "--steps=2", "--gin_param=run.routers.every_steps = 0"])
sys.setprofile(None)
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
imported = {file for file in files if file.startswith(package)}
found = {"imported": sorted(imported), "executed": sorted(executed), "step": sorted(in_step)}
open(path, "w").write(json.dumps(found))
sys.exit(code)
"""


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of some files.

    Attributes:
      name: what they are.
      files: their number.
      lines: lines of all.
      median: lines of the file in the middle.
    """

    name: str
    files: int
    lines: int
    median: int


def size_of(name: str, paths: Iterable[pathlib.Path]) -> Size:
    """Returns the size of files."""
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    return Size(name, len(lines), sum(lines), round(statistics.median(lines)) if lines else 0)


def folders(package: pathlib.Path) -> list[Size]:
    """Returns the size of each top-level folder of a package, and of the whole package last."""
    found = []
    for folder in sorted(path for path in package.iterdir() if path.is_dir()):
        paths = sorted(folder.rglob("*.py"))
        if paths:
            found.append(size_of(f"{folder.name}/", paths))
    return [*found, size_of("all", sorted(package.rglob("*.py")))]


def executed_by_a_step(package: pathlib.Path) -> list[Size]:
    """Returns the size of what two steps of training import, execute, and trace as the step."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        command = [sys.executable, "-c", _TRACED, str(package), f"{folder}/run", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = json.loads(path.read_text())
    titles = {
        "imported": "imported by `gshard-train`",
        "executed": "executed, from the command line to the update",
        "step": "executed by the training step alone",
    }
    return [size_of(title, map(pathlib.Path, found[name])) for name, title in titles.items()]
