"""RouterWatch: watches the routers of a training run, draws them, and tells what it sees."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lingvo_gshard.core import TokenKinds, jax, processes, tf
from lingvo_gshard.data import Batch
from lingvo_gshard.layers import MixtureOfExperts
from lingvo_gshard.training import (
    METRICS_FILE,
    Checkpoint,
    MetricsRow,
    ObservedRun,
    ReadMeasured,
    StepObserver,
)
from lingvo_gshard.wings.services.routers.counts import records_of, watch_routers, watched_layers
from lingvo_gshard.wings.services.routers.router_records import RecordsFile, RouterRecord, Verdicts
from lingvo_gshard.wings.services.routers.token_kinds import kinds_in

# Columns of a picture over time. A longer history is averaged to half as many.
_MOST_COLUMNS = 256
# The side of a square has _SMALLEST to _LARGEST pixels, so that a picture has about _WIDTH.
_SMALLEST, _LARGEST, _WIDTH = 2, 16, 512
# The colors of no load, of an even load and of all the load.
_PALE, _EVEN, _FULL = (246, 248, 250), (64, 146, 198), (8, 24, 68)
_NO_TOKEN = (196, 48, 43)


class LoadHistory:
    """The shares of a layer's experts over the watched steps so far, in few columns."""

    def __init__(self):
        self._columns: list[np.ndarray] = []
        self._steps_per_column = 1
        self._waiting: list[np.ndarray] = []

    def add(self, load: np.ndarray) -> None:
        """Adds the shares [E] of one watched step."""
        self._waiting.append(load)
        if len(self._waiting) < self._steps_per_column:
            return
        self._columns.append(np.mean(self._waiting, 0))
        self._waiting = []
        if len(self._columns) == _MOST_COLUMNS:
            pairs = np.reshape(self._columns, (_MOST_COLUMNS // 2, 2, -1))
            self._columns = list(pairs.mean(1))
            self._steps_per_column *= 2

    def table(self) -> np.ndarray:
        """Returns the shares [E, columns], oldest first."""
        rest = [np.mean(self._waiting, 0)] if self._waiting else []
        return np.stack([*self._columns, *rest], 1)


def heat_map(shares: np.ndarray, experts: int) -> np.ndarray:
    """Returns a picture of shares of the load, uint8 [height, width, 3].

    A pale square is little load, a blue one an even load, a dark one all of it. Red is none at all.

    Args:
      shares: the share of each row and column, 0 to 1.
      experts: E; 1/E is an even load.
    """
    relative = shares * experts
    # 0 for no load, 1/2 for an even one, towards 1 for all of it.
    height = (relative / (1.0 + relative))[..., None]
    pale, even, full = (np.array(color, np.float64) for color in (_PALE, _EVEN, _FULL))
    below = pale + (even - pale) * np.minimum(2.0 * height, 1.0)
    color = np.where(height <= 0.5, below, even + (full - even) * (2.0 * height - 1.0))
    color = np.where((shares == 0)[..., None], np.array(_NO_TOKEN, np.float64), color)
    cell = int(np.clip(_WIDTH // max(shares.shape), _SMALLEST, _LARGEST))
    return np.kron(np.rint(color).astype(np.uint8), np.ones((cell, cell, 1), np.uint8))


def by_kind(counts: Mapping[str, Sequence[int]]) -> np.ndarray:
    """Returns a picture with a row for each kind of token and a column for each expert."""
    table = np.array(list(counts.values()), np.float64)
    shares = table / np.maximum(table.sum(1, keepdims=True), 1.0)
    return heat_map(shares, table.shape[1])


_COMPILING = "compiling the statistics of the routers"
# Pictures are drawn again when the number of watched steps has grown by this factor.
_GROWTH = 1.1


class RouterWatch(StepObserver):
    """Measures the routers in every watched step, and reads the sums when the step has ended."""

    def __init__(self, run: ObservedRun):
        """Takes the run. Nothing is watched if its model has no experts."""
        self._run = run
        self._layers: dict[str, MixtureOfExperts] = watched_layers(run.trainer.task)
        self._period = run.params.run.routers.every_steps if self._layers else 0
        self._running: dict[int, tuple[ReadMeasured, TokenKinds | None]] = {}
        self._findings: Findings | None = None
        self._has_started = False

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Begins to watch, or goes on after the step of a checkpoint."""
        self._running = {}
        if self._period and processes.is_main():
            self._findings = Findings(self._run, self._layers)

    def before_step(self, step: int, batch: Batch) -> None:
        """Starts to measure if the step is a watched one."""
        if self._period and step % self._period == 0:
            kinds = kinds_in(self._run.input_, batch)
            self._guarded(lambda: self._start(step, batch, kinds))

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Writes and tells what was measured in a watched step."""
        if step in self._running:
            read, kinds = self._running.pop(step)
            self._guarded(lambda: self._finish(step, read(), kinds))

    def at_end(self) -> None:
        """Draws the last pictures, and says which routers need attention."""
        if self._findings:
            self._findings.end()

    def _start(self, step: int, batch: Batch, kinds: TokenKinds | None) -> None:
        # The first one is compiled.
        work = contextlib.nullcontext() if self._has_started else self._run.working(_COMPILING)
        self._has_started = True
        run = self._run
        with work:
            read = watch_routers(run.runtime, run.trainer, batch, kinds, step)
            self._running[step] = read, kinds

    def _finish(self, step: int, sums: Mapping[str, np.ndarray], kinds: TokenKinds | None) -> None:
        if self._findings:
            self._findings.add(step, records_of(step, sums, self._layers, kinds))

    def _guarded(self, call: Callable[[], None]) -> None:
        """Calls a function. Watching ends, and training goes on, if memory is too small for it."""
        try:
            call()
        except (tf.errors.ResourceExhaustedError, jax.errors.JaxRuntimeError) as error:
            self._period = 0
            self._run.say(
                "Warning: the routers are not watched any longer, since the forward pass of "
                f"run.routers failed: {str(error).splitlines()[0]}"
            )


class Findings:
    """The records of a run's routers: a file, curves, pictures and verdicts."""

    def __init__(self, run: ObservedRun, layers: Mapping[str, MixtureOfExperts]):
        """Begins with the records up to the step that the run goes on from."""
        self._run = run
        self._verdicts = Verdicts(run.params.run.routers, layers)
        self._histories = {path: LoadHistory() for path in layers}
        self._last: list[RouterRecord] = []
        self._file = RecordsFile(run.logdir.path, run.step, run.say)
        for record in self._file.earlier:
            if record.layer in self._histories:
                self._last = [r for r in self._last if r.step == record.step]
                self._keep(record)
        self._count = self._drawn = len({record.step for record in self._file.earlier})
        self._next_picture = self._count + 1
        self._tell_missing()

    def add(self, step: int, found: Sequence[RouterRecord]) -> None:
        """Writes and tells the records of a step."""
        self._last = []
        for record in found:
            for line in self._keep(record):
                self._run.say(line)
        self._file.append(self._last)
        self._count += 1
        self._run.writer.curves(step, _curves(self._last))
        if self._count >= self._next_picture:
            self._draw()

    def end(self) -> None:
        """Draws the last pictures, and says which routers need attention."""
        self._draw()
        for line in self._verdicts.summary():
            self._run.say(line)

    def _keep(self, record: RouterRecord) -> list[str]:
        """Adds a record to windows and pictures. Returns lines to show."""
        judged, lines = self._verdicts.add(record)
        self._last.append(judged)
        self._histories[record.layer].add(record.load)
        return lines

    def _tell_missing(self) -> None:
        """Says which watched steps before this one have no record."""
        run, earlier = self._run, self._file.earlier
        metrics = run.logdir.path / METRICS_FILE
        has_rows = metrics.exists() and metrics.stat().st_size > 0
        due = run.step - run.step % run.params.run.routers.every_steps
        newest = max((record.step for record in earlier), default=0)
        # A run that was made from another one has no rows of the steps of that one.
        if newest < due and (earlier or has_rows):
            run.say(
                f"Warning: routers.jsonl has no record of the watched steps {newest + 1:,} to "
                f"{due:,}; whether an expert had tokens in them is unknown"
            )

    def _draw(self) -> None:
        """Adds the pictures of all layers, unless they are there already."""
        if self._count == self._drawn:
            return
        found = {}
        for record in self._last:
            name = f"routers/{record.layer}"
            load = self._histories[record.layer].table()
            about = (
                f"Load over time: {record.num_experts} experts by watched steps to {record.step}"
            )
            found[f"{name}/load"] = heat_map(load, record.num_experts), about
            for kind, counts in (("language", record.by_language), ("class", record.by_class)):
                if counts:
                    about = f"Load by {kind}, rows from the top: {', '.join(counts)}"
                    found[f"{name}/by_{kind}"] = by_kind(counts), about
        self._run.writer.pictures(self._last[-1].step, found)
        self._drawn = self._count
        self._next_picture = max(self._count + 1, math.ceil(_GROWTH * self._count))


def _curves(records: Sequence[RouterRecord]) -> MetricsRow:
    """Returns the points of the TensorBoard curves of one watched step."""
    row: MetricsRow = {}
    for record in records:
        values = {
            "busiest_share": record.busiest[1],
            "dropped_share": record.dropped_share,
            "load_entropy": record.load_entropy,
            "token_entropy": record.token_entropy,
            "balance_distance": record.balance_distance,
            "dead_experts": float(len(record.dead_since)),
        }
        name = f"routers/{record.layer}"
        row |= {f"{name}/{k}": value for k, value in values.items() if value is not None}
    return row
