"""The part of a checkpoint besides arrays: Params, vocabularies, and the best evaluation."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import math
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from lingvo_gshard.core import VERSION, UserError, atomic, objects, regular
from lingvo_gshard.training.run.checkpoint.arrays import Arrays

# The last words of metrics that are better if they are higher.
_HIGHER = ("accuracy", "bleu", "chrf")


class Best(msgspec.Struct, frozen=True):
    """The best evaluation of a run so far.

    Attributes:
      metric: name of the metric, such as "dev/loss".
      value: the metric at `step`.
      step: the step that was evaluated. The first of equal ones.
      evaluations_since: number of later evaluations.
    """

    metric: str
    value: float
    step: int
    evaluations_since: int = 0

    def after(self, step: int, value: float) -> Best:
        """Returns the best after one more evaluation. NaN is never the best."""
        if self._is_better(value):
            return Best(self.metric, value, step)
        return msgspec.structs.replace(self, evaluations_since=self.evaluations_since + 1)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value) or math.isnan(self.value):
            return math.isnan(self.value) and not math.isnan(value)
        is_higher_better = self.metric.lower().endswith(_HIGHER)
        return value > self.value if is_higher_better else value < self.value


# Writes further files into the directory it is given.
WriteExtras = Callable[[pathlib.Path], None]

ITEM = "run"
_RECORD, _PARAMS, _EXTRAS = "run.json", "params.txt", "extras"
# The format of checkpoints that this version writes, and the newest that it reads.
FORMAT = 1
_PACKAGES = ("tensorflow", "orbax-checkpoint", "jax", "numpy")


class RunRecord(msgspec.Struct, frozen=True):
    """The content of run.json.

    Attributes:
      step: number of steps taken.
      position: position of the input, as JSON values.
      versions: package -> version, of the packages that wrote the checkpoint.
      digests: item -> path of an array -> its digest.
      files: path of each other file of the item -> its SHA-256. Checkpoints of earlier versions
        have none.
      best: the best evaluation so far; None if the run keeps none.
      digest: SHA-256 of this record with an empty digest. Checkpoints of earlier versions have an
        empty one.
      format: version of the format; unset in checkpoints of earlier versions, which have format 1.
    """

    step: int
    position: Any
    versions: dict[str, str]
    digests: dict[str, dict[str, int]]
    files: dict[str, str] = {}
    best: Best | None = None
    digest: str = ""
    format: int | msgspec.UnsetType = msgspec.UNSET

    def with_digest(self) -> RunRecord:
        """Returns the record with its digest."""
        plain = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return msgspec.structs.replace(self, digest=hashlib.sha256(plain).hexdigest())


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
      record: the content of run.json.
      params_text: the run's Params, as `Params.to_text` writes them.
      extras: directory of the input's files, such as vocabularies; a local copy for a bucket.
      arrays: item -> path -> array, of the items that were restored.
    """

    record: RunRecord
    params_text: str
    extras: pathlib.Path
    arrays: dict[str, Arrays] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return self.record.step

    @property
    def position(self) -> Any:
        """Position of the input, as JSON values."""
        return self.record.position

    @property
    def theta(self) -> Arrays:
        """The weights by path; empty if they were not restored."""
        return self.arrays.get("theta", {})

    @property
    def moments(self) -> Arrays:
        """The optimizer's moments by path; empty if they were not restored."""
        return self.arrays.get("moments", {})


class _Origin(msgspec.Struct):
    """The part of run.json that every format has."""

    format: int = 1
    versions: dict[str, str] = {}


def write_run(
    directory: pathlib.Path, record: RunRecord, params_text: str, write_extras: WriteExtras | None
) -> None:
    """Writes a `run` item: run.json, params.txt and extras/.

    Args:
      record: the content of run.json; its `files` are filled in.
      write_extras: writes files into the directory extras/; None leaves it empty.
    """
    (directory / _PARAMS).write_text(params_text, encoding="utf-8")
    (directory / _EXTRAS).mkdir()
    if write_extras is not None:
        write_extras(directory / _EXTRAS)
    files = _file_digests(directory)
    record = msgspec.structs.replace(record, files=files, format=FORMAT).with_digest()
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    (directory / _RECORD).write_bytes(text)


def read_run(checkpoint: pathlib.Path) -> Checkpoint:
    """Returns a checkpoint without arrays, from its directory.

    Raises:
      OSError: a file cannot be read.
      UserError: a file is damaged or missing, or a later version wrote the checkpoint.
    """
    if problem := newer_format(checkpoint):
        raise UserError(problem)
    # Orbax and TensorStore would wait for a named pipe.
    regular.require_regular_tree(checkpoint)
    directory = objects.local_folder(checkpoint / ITEM)
    record = atomic.decode(objects.read_bytes(directory / _RECORD), RunRecord)
    if record.digest and record != record.with_digest():
        raise UserError(f"{ITEM}/{_RECORD} is damaged")
    found = _file_digests(directory)
    for name, digest in record.files.items():
        if found.get(name) != digest:
            raise UserError(f"{ITEM}/{name} is {'damaged' if name in found else 'missing'}")
    return Checkpoint(
        record=record,
        params_text=objects.read_text(directory / _PARAMS),
        extras=directory / _EXTRAS,
    )


def newer_format(checkpoint: pathlib.Path) -> str | None:
    """Returns a sentence if a later version wrote a checkpoint; None if not, or if unreadable."""
    try:
        content = objects.read_bytes(checkpoint / ITEM / _RECORD)
        origin = atomic.decode(content, _Origin)
    except (OSError, msgspec.DecodeError):
        return None
    if origin.format <= FORMAT:
        return None
    version = origin.versions.get("lingvo_gshard", "a later version")
    return (
        f"{checkpoint} has format {origin.format}, written by lingvo_gshard {version}; this is "
        f"{VERSION}, which reads format {FORMAT}. Install that version"
    )


def _file_digests(directory: pathlib.Path) -> dict[str, str]:
    """Returns path -> SHA-256 of all files below a directory except run.json."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(objects.read_bytes(path)).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != _RECORD
    }


def versions() -> dict[str, str]:
    """Returns package -> version, as a checkpoint records them."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"lingvo_gshard": VERSION, **found}
