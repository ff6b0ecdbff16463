"""Records of a run: launches, evaluations and shardings, as JSON files in its directory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from lingvo_gshard.core import VERSION, atomic, objects, write_atomically
from lingvo_gshard.sharding import Mesh, Partitioning, weight_rows
from lingvo_gshard.training import Trainer

_Row = TypeVar("_Row")


def append_row(path: pathlib.Path, row: object) -> None:
    """Appends a row to a local file or one in a bucket. Raises OSError if it cannot be written."""
    objects.append(path, msgspec.json.encode(row) + b"\n")


def read_rows(path: pathlib.Path, row: type[_Row]) -> list[_Row]:
    """Returns the rows of a file, which may be missing. Damaged rows are left out."""
    try:
        lines = objects.read_bytes(path).splitlines()
    except OSError:
        return []
    decoder, found = msgspec.json.Decoder(row), []
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            found.append(decoder.decode(line))
    return found


def read_record(path: pathlib.Path, record: type[_Row]) -> _Row | None:
    """Returns the record in a file; None if the file is missing or damaged."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return atomic.decode(objects.read_bytes(path), record)
    return None


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
      command: the command line, for a shell.
      host: name of the main process's machine.
      runtime: "local", "spmd" or "tpu_strategy".
      devices: the devices in words, such as "8 CPU devices as data=8".
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


def append_launch(logdir: pathlib.Path, launch: Launch) -> None:
    """Appends a launch to launches.jsonl. Raises OSError if it cannot be written."""
    append_row(logdir / LAUNCHES_FILE, launch)


def read_launches(logdir: pathlib.Path) -> list[Launch]:
    """Returns a run's launches, the first one first; runs of other versions may have none."""
    return read_rows(logdir / LAUNCHES_FILE, Launch)


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
    """Returns the versions of Python, of this package and of the packages that it computes with."""
    own = {"python": platform.python_version(), "lingvo_gshard": VERSION}
    return own | installed_versions(_PACKAGES)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns package -> version of the packages that are installed, without the others."""
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


# The file in a log directory that has a row for each evaluation.
EVALUATIONS_FILE = "evaluations.jsonl"


class EvaluationRow(msgspec.Struct, frozen=True):
    """One evaluation of a checkpoint.

    Attributes:
      time: seconds since 1970.
      precision: how weights were stored and multiplied to decode.
      size: the amount of data in words, such as "1,000 rows".
      options: what was asked of the evaluation, such as its languages or a beam size.
      scores: what the task's evaluation returns as its record.
    """

    time: float
    step: int
    split: str
    precision: str
    size: str
    options: dict[str, Any]
    scores: dict[str, Any]


def append_evaluation(logdir: pathlib.Path, row: EvaluationRow) -> None:
    """Appends an evaluation to evaluations.jsonl. Raises OSError if it cannot be written."""
    append_row(logdir / EVALUATIONS_FILE, row)


def read_evaluations(logdir: pathlib.Path) -> list[EvaluationRow]:
    """Returns a run's evaluations, the first one first; none if the file is missing."""
    return read_rows(logdir / EVALUATIONS_FILE, EvaluationRow)


# The file in a log directory that describes the newest launch.
SHARDING_FILE = "sharding.json"


class TensorSharding(msgspec.Struct, frozen=True):
    """The storage of a weight or a moment.

    Attributes:
      kind: "weights" or "moments".
      split: the split as text, such as "E over data (8)", or "replicated".
      bytes: size of the whole tensor.
    """

    path: str
    kind: str
    layout: str
    shape: tuple[int, ...]
    dtype: str
    split: str
    bytes: int
    bytes_per_device: int


class Sharding(msgspec.Struct, frozen=True):
    """The storage of all weights and moments of a run.

    Attributes:
      mesh: axes and sizes, such as "data=4,model=2"; "" for one device.
      strategy: name of the strategy; "" for one device.
      table: the strategy's rules as text.
    """

    mesh: str
    devices: int
    strategy: str
    table: str
    tensors: list[TensorSharding]


def trainer_sharding(trainer: Trainer, partitioning: Partitioning | None) -> Sharding:
    """Returns how a trainer's state is stored; without a partitioning, on one device."""
    one_device = Mesh((("data", 1),))
    given = partitioning or Partitioning.make(one_device, "replicated")
    specs = trainer.state_specs()
    tensors = [
        msgspec.convert({**vars(row), "kind": kind}, TensorSharding)
        for kind in ("weights", "moments")
        for row in weight_rows(specs["theta" if kind == "weights" else kind], given, kind)
    ]
    if partitioning is None:
        return Sharding("", 1, "", "", tensors)
    mesh, strategy = partitioning.mesh, partitioning.strategy
    return Sharding(str(mesh), mesh.size, strategy.name, strategy.to_text(), tensors)


def write_sharding(logdir: pathlib.Path, sharding: Sharding) -> None:
    """Replaces sharding.json. Raises OSError if it cannot be written."""
    write_atomically(str(logdir / SHARDING_FILE), msgspec.json.encode(sharding))


def read_sharding(logdir: pathlib.Path) -> Sharding | None:
    """Returns how a run is stored; None if that was not recorded, or the file is damaged."""
    return read_record(logdir / SHARDING_FILE, Sharding)
