"""Statistics of the weights in a checkpoint, and the differences of two checkpoints."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags
from rich.markup import escape

from lingvo_gshard.api.run import Run
from lingvo_gshard.core import Params, UserError, VariableSpec
from lingvo_gshard.tools.console import Console, make_table, stages_on_terminal
from lingvo_gshard.tools.flags.definitions import Flags, integer, refuse
from lingvo_gshard.training import Checkpoint, Trainer, read_run, steps_in

if TYPE_CHECKING:
    from lingvo_gshard.wings.open_models.streamed import WeightReader

_ITEM = "theta"
# Larger weights are read in slices along their first dimension.
_MOST_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class WeightDifference:
    """The difference between a weight and the same weight of another checkpoint.

    Attributes:
      relative: Euclidean norm of the difference over the norm of the other checkpoint's weight.
      largest: the largest difference of an element.
      is_equal: whether all elements are the same, NaNs included.
    """

    relative: float
    largest: float
    is_equal: bool


@dataclasses.dataclass(frozen=True)
class WeightStatistics:
    """Statistics of a weight's elements. Elements that are not finite count in `not_finite` alone.

    Attributes:
      largest: the largest absolute value.
      zeros: share of elements that are 0.
      not_finite: number of elements that are NaN or infinite.
      difference: the difference to another checkpoint; None if none is compared.
    """

    path: str
    layout: str
    shape: tuple[int, ...]
    dtype: str
    mean: float
    deviation: float
    largest: float
    zeros: float
    not_finite: int
    difference: WeightDifference | None = None


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """The weights of one checkpoint on disk."""

    directory: pathlib.Path
    checkpoint: Checkpoint

    @classmethod
    def open(cls, checkpoints: pathlib.Path, step: int | None, flag: str) -> StoredWeights:
        """Opens a checkpoint, by default the newest. Raises UserError if it is missing or damaged.

        `flag` is the flag that named the step.
        """
        steps = steps_in(checkpoints)
        if not steps:
            raise UserError(f"{checkpoints} holds no complete checkpoint")
        if step is not None and step not in steps:
            have = ", ".join(map(str, steps))
            raise UserError(f"--{flag}={step}: there are checkpoints of the steps {have}")
        directory = checkpoints / str(steps[-1] if step is None else step)
        try:
            return cls(directory, read_run(directory))
        except OSError as error:
            raise UserError(f"{directory} cannot be read: {error}") from None

    @property
    def paths(self) -> frozenset[str]:
        """The paths of all weights."""
        return frozenset(self.checkpoint.record.digests[_ITEM])

    def reader(self) -> WeightReader:
        """Returns a reader of the weights."""
        # Imports Orbax, which the command line's help does not need.
        from lingvo_gshard.wings.open_models.streamed import WeightReader

        return WeightReader(self.directory, self.checkpoint, _ITEM)


def statistics(
    stored: StoredWeights, specs: Mapping[str, VariableSpec], other: StoredWeights | None = None
) -> Iterator[WeightStatistics]:
    """Yields the statistics of each weight.

    Memory is bounded by one weight, or by the largest slice of a weight of more than 256 MiB.
    Compares each weight with the same weight of `other`, if that is given.

    Raises:
      UserError: a weight is damaged, or the other checkpoint lacks it.
    """
    own, theirs = stored.reader(), other and other.reader()
    for path, spec in specs.items():
        sums, changes = _Sums(), _DifferenceSums()
        dtype = ""
        for index in _slices(spec):
            part = own.read(path, index)
            dtype = part.dtype.name
            sums.add(part)
            if theirs:
                changes.add(part, theirs.read(path, index), path)
        yield WeightStatistics(
            path,
            spec.layout,
            tuple(spec.shape),
            dtype,
            *sums.result(),
            changes.result() if theirs else None,
        )


def _slices(spec: VariableSpec) -> Sequence[tuple[int, ...]]:
    if 4 * math.prod(spec.shape) <= _MOST_BYTES or len(spec.shape) < 2:
        return [()]
    return [(index,) for index in range(spec.shape[0])]


class _Sums:
    """The sums over a weight's elements, in float64."""

    def __init__(self):
        self._count = self._zeros = self._finite = 0
        self._sum = self._squares = self._largest = 0.0

    def add(self, part: np.ndarray) -> None:
        """Counts some elements."""
        values = part.astype(np.float64)
        is_finite = np.isfinite(values)
        finite = values[is_finite]
        self._count += values.size
        self._finite += finite.size
        self._zeros += int(np.count_nonzero(finite == 0))
        self._sum += float(finite.sum())
        self._squares += float(np.square(finite).sum())
        self._largest = max(self._largest, float(np.abs(finite).max(initial=0.0)))

    def result(self) -> tuple[float, float, float, float, int]:
        """Returns mean, deviation, largest, zeros and not_finite."""
        finite = max(self._finite, 1)
        mean = self._sum / finite
        deviation = math.sqrt(max(self._squares / finite - mean**2, 0.0))
        zeros = self._zeros / max(self._count, 1)
        return mean, deviation, self._largest, zeros, self._count - self._finite


class _DifferenceSums:
    """The sums over the differences of two weights, in float64."""

    def __init__(self):
        self._squares = self._reference = self._largest = 0.0
        self._is_equal = True

    def add(self, part: np.ndarray, other: np.ndarray, path: str) -> None:
        """Counts some elements. Raises ValueError if the weights have different shapes."""
        if part.shape != other.shape:
            raise UserError(
                f"--compare: {path} has the shape {list(part.shape)} here and {list(other.shape)} "
                "there; the checkpoints are of different models"
            )
        self._is_equal &= np.array_equal(part, other, equal_nan=True)
        ours, theirs = part.astype(np.float64), other.astype(np.float64)
        difference = np.abs(ours - theirs)
        self._squares += float(np.square(difference).sum())
        self._reference += float(np.square(theirs).sum())
        self._largest = max(self._largest, float(difference.max(initial=0.0)))

    def result(self) -> WeightDifference:
        """Returns the difference."""
        if self._reference:
            relative = math.sqrt(self._squares / self._reference)
        else:
            relative = math.inf if self._squares else 0.0
        return WeightDifference(relative, self._largest, self._is_equal)


TRAINED_FLAGS: Flags = dict(
    logdir="A trained run to inspect, in place of --experiment.",
    step=integer("Checkpoint of --logdir; by default the newest.", least=0),
    compare="Another run, whose weights are compared.",
    compare_step=integer(
        "Checkpoint of --compare; by default its newest. Alone: another step of --logdir.", least=0
    ),
)


def inspect(values: flags.FlagValues, console: Console) -> tuple[Params, Trainer, dict[str, Any]]:
    """Prints the statistics of a run's weights.

    Returns the run's experiment, its trainer with the run's vocabularies, and what was printed as a
    record for JSON. Raises UserError if a flag does not suit a run, or a checkpoint is damaged.
    """
    others = ("experiment", "plan", "gin_file", "gin_param")
    refuse(values, others, "does not go with --logdir: a run has its own settings")
    with stages_on_terminal() as stages:
        stages.begin("Reading the weights")
        run = Run(values.logdir)
        stored = StoredWeights.open(run.logdir.checkpoints, values.step, "step")
        other = _compared(values, run)
        with run.open_checkpoints() as (_, trainer):
            specs = dict(trainer.theta_specs.flatten_items())
        for weights, place in ((stored, values.logdir), (other, values.compare)):
            if weights and (missing := sorted(specs.keys() - weights.paths)):
                raise UserError(f"{place} has no weight {missing[0]}, which --logdir declares")
        rows = list(statistics(stored, specs, other))
    head = f"{run.params.name}, step {stored.checkpoint.step:,}"
    if other:
        compared = values.compare or values.logdir
        head += f", compared with step {other.checkpoint.step:,} of {compared}"
    console.say(f"{head}:")
    _print(console, rows)
    record = {
        "experiment": run.params.name,
        "step": stored.checkpoint.step,
        "statistics": [dataclasses.asdict(row) for row in rows],
    }
    if other:
        record["compared_step"] = other.checkpoint.step
    return run.params, trainer, record


def _compared(values: flags.FlagValues, run: Run) -> StoredWeights | None:
    """Returns the checkpoint to compare with; None if none is asked for."""
    if values.compare is None and values.compare_step is None:
        return None
    other = run if values.compare is None else Run(values.compare)
    return StoredWeights.open(other.logdir.checkpoints, values.compare_step, "compare_step")


def _print(console: Console, rows: list[WeightStatistics]) -> None:
    has_difference = any(row.difference for row in rows)
    more = ("change", "largest change") if has_difference else ()
    heads = ("mean", "deviation", "largest", "zeros", "not finite", *more)
    table = make_table("weight", "layout", "shape", "type", right=heads)
    for row in rows:
        cells = [
            escape(row.path),
            row.layout,
            ",".join(map(str, row.shape)),
            row.dtype,
            f"{row.mean:.2e}",
            f"{row.deviation:.2e}",
            f"{row.largest:.2e}",
            f"{row.zeros:.1%}",
            f"{row.not_finite:,}" if row.not_finite else "",
        ]
        if change := row.difference:
            cells += ["equal"] if change.is_equal else [f"{change.relative:.1e}"]
            cells += [f"{change.largest:.1e}"]
        table.add_row(*cells)
    console.print_table(table)
    for row in filter(lambda row: row.not_finite, rows):
        console.say(f"Warning: {row.path} has {row.not_finite:,} values that are not finite")
