"""Compares the run that was disturbed with one that was not: every array and every metric."""

import dataclasses
import json
import math
import pathlib

import numpy as np

from lingvo_gshard.tools.console import libraries
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.monitoring.metrics import MEASURED

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest differences that count as equal; zero: to the bit.

    Attributes:
      arrays: of an element of an array, relative to the array's largest magnitude if that is
        above 1.
      metrics: of a metric, relative to its magnitude if that is above 1.
    """

    arrays: float = 0.0
    metrics: float = 0.0

    @classmethod
    def across_meshes(cls) -> "Tolerance":
        """Meshes add the same numbers in another order."""
        return cls(arrays=1e-6, metrics=1e-5)


@dataclasses.dataclass
class Comparison:
    """How two runs differ.

    Attributes:
      differences: what is not equal, in words; empty if nothing.
      arrays: number of arrays that were compared.
      largest: the largest difference of an element.
      rows: number of rows of metrics.jsonl that were compared.
      evaluations: number of rows with metrics of the dev split.
    """

    differences: list[str] = dataclasses.field(default_factory=list)
    arrays: int = 0
    largest: float = 0.0
    rows: int = 0
    evaluations: int = 0


def compare(one: pathlib.Path, other: pathlib.Path, steps: int, tolerance: Tolerance) -> Comparison:
    """Compares the newest checkpoints and the metrics of two run directories.

    Args:
      one: the run that was disturbed.
      other: the run that was not.
      steps: number of steps of both.
      tolerance: what counts as equal.
    """
    libraries.prepare()
    checkpoints = []
    for logdir in (one, other):
        store = CheckpointStore(logdir / "checkpoints", writable=False)
        checkpoints.append(store.restore())
        store.close()
    mine, theirs = checkpoints
    result = Comparison()
    if not mine.step == theirs.step == steps:
        result.differences.append(f"checkpoints of steps {mine.step}, {theirs.step}; not {steps}")
    if mine.position != theirs.position:
        result.differences.append(f"input at {mine.position}, not at {theirs.position}")
    compare_arrays(_flat(mine.arrays), _flat(theirs.arrays), tolerance, result)
    compare_rows(read_rows(one), read_rows(other), steps, tolerance, result)
    return result


def compare_arrays(
    mine: dict[str, np.ndarray],
    theirs: dict[str, np.ndarray],
    tolerance: Tolerance,
    result: Comparison,
) -> None:
    """Adds to `result` how arrays differ, by name."""
    if mine.keys() != theirs.keys():
        result.differences.append(f"arrays {sorted(mine.keys() ^ theirs.keys())} are in one only")
    for name in sorted(mine.keys() & theirs.keys()):
        one, other = (np.asarray(arrays[name]) for arrays in (mine, theirs))
        result.arrays += 1
        if one.tobytes() == other.tobytes():
            continue
        largest = float(np.max(np.abs(one.astype(np.float64) - other.astype(np.float64))))
        result.largest = max(result.largest, largest)
        if not largest <= tolerance.arrays * max(float(np.max(np.abs(other))), 1.0):
            result.differences.append(f"{name} differs by {largest:.3g}")


def compare_rows(
    mine: list[dict], theirs: list[dict], steps: int, tolerance: Tolerance, result: Comparison
) -> None:
    """Adds to `result` steps that are missing, doubled or out of order, and metrics that differ."""
    numbers = [row["step"] for row in mine]
    expected = list(range(1, steps + 1))
    if numbers != expected:
        missing = sorted(set(expected) - set(numbers))[:_SHOWN]
        doubled = sorted(step for step in set(numbers) if numbers.count(step) > 1)[:_SHOWN]
        result.differences.append(
            f"metrics.jsonl has {len(numbers)} rows for {steps} steps; missing {missing}, doubled "
            f"{doubled}"
        )
    by_step = {row["step"]: row for row in theirs}
    for row in mine:
        result.rows += 1
        result.evaluations += any(name.startswith("dev/") for name in row)
        result.differences += _differences(row, by_step.get(row["step"], {}), tolerance)


def _differences(row: dict, other: dict, tolerance: Tolerance) -> list[str]:
    step = row["step"]
    row, other = ({k: v for k, v in r.items() if k not in MEASURED} for r in (row, other))
    if row.keys() != other.keys():
        return [f"step {step}: metrics {sorted(row.keys() ^ other.keys())} are in one run only"]
    return [
        f"step {step}: {name} is {row[name]}, not {other[name]}"
        for name in row
        if row[name] != other[name]
        and not math.isclose(
            row[name], other[name], rel_tol=tolerance.metrics, abs_tol=tolerance.metrics
        )
    ]


def read_rows(logdir: pathlib.Path) -> list[dict]:
    """Returns the rows of metrics.jsonl. Raises ValueError if a line is damaged."""
    text = (logdir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _flat(items: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{item}.{path}": x for item, arrays in items.items() for path, x in arrays.items()}
