"""Records command, versions and devices whenever a run starts or resumes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping

import msgspec

import lingvo_gshard
from lingvo_gshard.training.run.records import json_lines

# The file in a log directory that has a row for each launch.
LAUNCHES_FILE = "launches.jsonl"

_PACKAGES = ("tensorflow", "jax", "jaxlib", "libtpu", "numpy", "scipy", "orbax-checkpoint")
# Beginnings of the names of settings that only jax, XLA and their drivers read.
PREFIXES = ("JAX_", "XLA_", "LIBTPU_", "NCCL_")
# TensorFlow has no prefix of its own: Terraform's TF_VAR_ may hold secrets.
_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "TF_DETERMINISTIC_OPS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_GPU_ALLOCATOR",
    "TF_XLA_FLAGS",
)
# The settings of this process at its start: libraries change them when they are imported.
_AT_START = pathlib.Path("/proc/self/environ")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One start or resumption of a run.

    Attributes:
      time: seconds since 1970.
      step: the step that it resumed from; 0 for a new run.
      steps: `run.steps`, the step to end with.
      experiment: name of the experiment.
      command: the command line, for a shell.
      directory: where the command was started.
      host: name of the main process's machine.
      processes: number of processes.
      runtime: "local", "spmd" or "tpu_strategy".
      devices: the devices in words, such as "8 CPU devices as data=8".
      parameters: number of the model's parameters.
      active_parameters: number of those that each token uses.
      versions: package -> version.
      environment: settings of jax, XLA, TensorFlow and their drivers.
    """

    time: float
    step: int
    steps: int
    experiment: str
    command: str
    directory: str
    host: str
    processes: int
    runtime: str
    devices: str
    parameters: int
    active_parameters: int
    versions: dict[str, str]
    environment: dict[str, str]


def append(logdir: pathlib.Path, launch: Launch) -> None:
    """Appends a launch to launches.jsonl. Raises OSError if it cannot be written."""
    json_lines.append(logdir / LAUNCHES_FILE, launch)


def read(logdir: pathlib.Path) -> list[Launch]:
    """Returns a run's launches, the first one first; runs of other versions may have none."""
    return json_lines.read(logdir / LAUNCHES_FILE, Launch)


def command_line() -> str:
    """Returns the command that started this process, as one line for a shell."""
    interpreter, *arguments = sys.orig_argv
    if arguments and pathlib.Path(arguments[0]).name.startswith("gshard-"):
        # The interpreter of a console script is not typed.
        interpreter, *arguments = arguments
    return " ".join(map(_quoted, [pathlib.Path(interpreter).name, *arguments]))


def _quoted(argument: str) -> str:
    """Returns an argument for a shell; settings such as a = 'b' stay readable in double quotes."""
    if "'" in argument and not set(argument) & set('"$`\\!\n'):
        return f'"{argument}"'
    return shlex.quote(argument)


def directory() -> str:
    """Returns the current directory; "" if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Returns the versions of Python, of this package and of those that it computes with."""
    own = {"python": platform.python_version(), "lingvo_gshard": lingvo_gshard.__version__}
    return own | installed_versions(_PACKAGES)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those of the packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def environment_at_start() -> dict[str, str]:
    """Returns the environment that this process was started with."""
    try:
        entries = _AT_START.read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return dict(os.environ)
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of an environment that jax, XLA, TensorFlow or their drivers read."""
    names = (n for n in environment if n in _SETTINGS or n.startswith(PREFIXES))
    return {name: environment[name] for name in sorted(names)}
