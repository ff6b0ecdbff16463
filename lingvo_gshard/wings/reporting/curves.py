"""Curves of a run: its metrics over the steps, thinned so that every spike stays visible."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Sequence

import msgspec

from lingvo_gshard.training import MetricsRow
from lingvo_gshard.wings.services.metrics_rows import first_and_last, rows_until
from lingvo_gshard.wings.services.run_records import Launch

_TRAIN = "train"


class RecordedCompilation(msgspec.Struct, frozen=True):
    """A compilation for a step that a run has recorded; fields as in `Compilation`."""

    step: int
    function: str
    inputs: dict[str, str]
    tracing: float
    lowering: float
    compiling: float
    is_cached: bool = False
    memory: dict[str, int] | None = None

    @property
    def seconds(self) -> float:
        """Seconds from the call to the compiled program."""
        return self.tracing + self.lowering + self.compiling


class Recompilation(msgspec.Struct, frozen=True):
    """A compilation of the training step after the run's first step.

    Attributes:
      step: the step that waited for the compilation.
      changes: differences between the inputs of this program and of the previous program, in words.
    """

    step: int
    seconds: float
    changes: list[str]


def recompilations(
    programs: Sequence[RecordedCompilation], launches: Iterable[Launch]
) -> list[Recompilation]:
    """Returns the training steps that were compiled again in the middle of a run.

    The first step after a start is always compiled.
    """
    trained = [program for program in programs if program.function == _TRAIN]
    starts = {launch.step + 1 for launch in launches} or {one.step for one in trained[:1]}
    found, before = [], {}
    for program in trained:
        if program.step not in starts:
            changes = _changes(before, program.inputs)
            found.append(Recompilation(program.step, program.seconds, changes))
        before = program.inputs
    return found


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [
        f"{name}: {before.get(name, 'missing')} became {after.get(name, 'missing')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


# Prefix of the metrics of the dev split.
DEV = "dev/"
# Separates a layer from its metric in a curve's name.
LAYER = "/"
# Numbers of a curve are rounded to this many digits. In a picture nobody sees the difference.
_DIGITS = 5
FEWEST_OF_LAYER, MOST_OF_LAYER = 12, 120
# The steps of one kind beyond this number are counted, but not listed.
_MOST_MARKS = 1000
# A metric of the dev split with more points than these is thinned.
_MOST_POINTS = 500
# Number of steps that means at the end of a run cover.
TAIL = 50
# A step that no run reaches.
_ENDLESS = 2**62


class Curve(msgspec.Struct, frozen=True):
    """One metric over the intervals of a `Curves`; None where the interval has no value.

    Attributes:
      low: the smallest values of the intervals; empty if each interval is one step.
      high: the largest values; empty if each interval is one step.
    """

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Curves(msgspec.Struct, frozen=True):
    """Metrics over consecutive intervals of steps: name -> values in each interval."""

    first: list[int]
    last: list[int]
    metrics: dict[str, Curve]


class Points(msgspec.Struct, frozen=True):
    """A metric that is known at some steps only, such as the loss of the dev split."""

    steps: list[int]
    values: list[float]


class Marked(msgspec.Struct, frozen=True):
    """Steps with an event that curves mark: how many, and the first few of them."""

    count: int
    steps: list[int]


class History(msgspec.Struct, frozen=True):
    """Everything in a run's metrics.

    Attributes:
      first_step: the first step with a row.
      last_step: the last step with a row.
      curves: metrics of the whole model.
      layers: metrics of single layers, thinned more.
      dev: metrics of the whole model on the dev split.
      tail: mean of each metric of the whole model over the last steps, at most `TAIL`.
      not_finite: steps with a value that is not finite.
    """

    first_step: int
    last_step: int
    rows: int
    curves: Curves
    layers: Curves
    dev: dict[str, Points]
    tail: dict[str, float]
    spikes: Marked
    not_finite: Marked


def read_history(path: pathlib.Path, points: int, layer_points: int) -> History | None:
    """Returns what a file of metrics says; None if it has no row.

    Args:
      path: the file, which may be missing or damaged.
      points: number of intervals of the curves of the whole model, at most.
      layer_points: number of intervals of all curves of layers together. Each has between
        `FEWEST_OF_LAYER` and `MOST_OF_LAYER`.
    """
    ends = first_and_last(path, _ENDLESS, TAIL)
    if not ends:
        return None
    (first, row), last = ends[0], ends[-1][0]
    curves = sum(LAYER in name and not name.startswith(DEV) for name in row)
    of_layer = max(FEWEST_OF_LAYER, min(MOST_OF_LAYER, layer_points // max(curves, 1)))
    reader = _Reader(last - first + 1, first, points, of_layer)
    for step, row in rows_until(path, last):
        reader.add(step, row)
    return reader.history(_means([row for step, row in ends if step > last - TAIL]))


class _Reader:
    """Collects the rows of a run in the order of their steps."""

    def __init__(self, steps: int, first: int, intervals: int, layer_intervals: int):
        self._curves = _Thinning(first, math.ceil(steps / intervals))
        self._layers = _Thinning(first, math.ceil(steps / layer_intervals))
        self._dev: dict[str, Points] = {}
        self._spikes, self._not_finite = Marked(0, []), Marked(0, [])
        self._rows = 0
        self._first = self._last = first

    def add(self, step: int, row: MetricsRow) -> None:
        self._rows += 1
        self._last = step
        if row.get("spike"):
            self._spikes = _marked(self._spikes, step)
        if None in row.values():
            self._not_finite = _marked(self._not_finite, step)
        whole, layers = {}, {}
        for name, value in row.items():
            if name.startswith(DEV):
                metric = name.removeprefix(DEV)
                if value is not None and LAYER not in metric:
                    points = self._dev.setdefault(metric, Points([], []))
                    points.steps.append(step)
                    points.values.append(_rounded(value))
            else:
                (layers if LAYER in name else whole)[name] = value
        self._curves.add(step, whole)
        self._layers.add(step, layers)

    def history(self, tail: MetricsRow) -> History:
        return History(
            self._first,
            self._last,
            self._rows,
            self._curves.curves(),
            self._layers.curves(),
            {name: _fewer(points) for name, points in self._dev.items()},
            tail,
            self._spikes,
            self._not_finite,
        )


class _Thinning:
    """Reduces the rows of each interval of `width` steps to mean, smallest and largest value."""

    def __init__(self, first: int, width: int):
        self._origin, self._width = first, width
        self._index: int | None = None
        self._waiting: list[tuple[int, MetricsRow]] = []
        self._first: list[int] = []
        self._last: list[int] = []
        self._curves: dict[str, Curve] = {}

    def add(self, step: int, row: MetricsRow) -> None:
        index = (step - self._origin) // self._width
        if index != self._index:
            self._end_interval()
            self._index = index
        self._waiting.append((step, row))

    def curves(self) -> Curves:
        self._end_interval()
        return Curves(self._first, self._last, self._curves)

    def _end_interval(self) -> None:
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        before = len(self._first)
        self._first.append(rows[0][0])
        self._last.append(rows[-1][0])
        for name in dict.fromkeys(name for _, row in rows for name in row):
            if name not in self._curves:
                # The metric is new: earlier intervals have no value.
                blank: list[float | None] = [None] * before
                extra = [] if self._width == 1 else blank
                self._curves[name] = Curve(list(blank), list(extra), list(extra))
        for name, curve in self._curves.items():
            values = [row[name] for _, row in rows if row.get(name) is not None]
            curve.mean.append(_rounded(sum(values) / len(values)) if values else None)
            if self._width > 1:
                curve.low.append(_rounded(min(values)) if values else None)
                curve.high.append(_rounded(max(values)) if values else None)


def _fewer(points: Points) -> Points:
    """Returns at most about `_MOST_POINTS` of the points: best, worst and last ones remain."""
    count, values = len(points.steps), points.values
    kept = {*range(0, count, math.ceil(count / _MOST_POINTS)), count - 1}
    kept |= {values.index(min(values)), values.index(max(values))}
    places = sorted(kept)
    return Points([points.steps[i] for i in places], [values[i] for i in places])


def _marked(marked: Marked, step: int) -> Marked:
    if marked.count < _MOST_MARKS:
        marked.steps.append(step)
    return Marked(marked.count + 1, marked.steps)


def _means(rows: Sequence[MetricsRow]) -> MetricsRow:
    """Returns the mean of each metric of the whole model over the rows that have it."""
    metrics = dict.fromkeys(name for row in rows for name in row if LAYER not in name)
    columns = {m: [row[m] for row in rows if row.get(m) is not None] for m in metrics}
    return {name: sum(values) / len(values) for name, values in columns.items() if values}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
