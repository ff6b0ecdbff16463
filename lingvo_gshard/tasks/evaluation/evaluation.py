"""Evaluation: the scores of a model on a split, ready to be printed and saved."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lingvo_gshard.core.bound_function import WeightsHolder
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.progress import SILENT, PartProgress, Progress
from lingvo_gshard.data.packed_input import PairInput
from lingvo_gshard.data.sources.row import Row, rows_by_language


class EvaluationRuntime(WeightsHolder, Protocol):
    """Holds a model's weights, decodes with them and computes metrics with them."""

    def eval_step(self, batch: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
        """Returns the metrics of one batch without training: name -> (value, weight)."""
        ...


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of scores to be printed.

    Attributes:
      columns: the head of each column; "" for none.
      rows: cells of each row, as many as columns.
      summary: cells of a separate last row, such as an average; None for no such row.
      text_columns: indices of the columns that are aligned to the left; the others are numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: Sequence[str] | None = None
    text_columns: Sequence[int] = (0,)


class Evaluation(abc.ABC):
    """The scores of a model on one split."""

    @property
    @abc.abstractmethod
    def size(self) -> str:
        """The amount of data scored, such as "1,000 rows"."""

    @abc.abstractmethod
    def to_record(self) -> dict[str, Any]:
        """Returns all scores by name: numbers, strings, and lists and dicts of them."""

    @abc.abstractmethod
    def table(self) -> Table:
        """Returns the main scores for a reader."""

    def notes(self) -> list[str]:
        """Returns further lines for a reader, printed below the table."""
        return []

    def output_rows(self) -> Iterator[Sequence[str]]:
        """Yields the cells of each row of the file that gshard-evaluate --output writes."""
        yield from ()


def perplexity(cross_entropy: float) -> float:
    """Returns exp(nats per token), infinity where that overflows."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf


class WeightedMeans:
    """Averages metrics, name -> (value, weight), over batches."""

    def __init__(self):
        self._sums: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Adds the metrics of one batch."""
        for name, (value, weight) in metrics.items():
            total = self._sums.setdefault(name, [0.0, 0.0])
            total[0] += value * weight
            total[1] += weight

    def means(self) -> dict[str, float]:
        """Returns name -> mean; NaN where all weights were zero."""
        return {
            name: total / weight if weight else math.nan
            for name, (total, weight) in self._sums.items()
        }


@dataclasses.dataclass(frozen=True)
class MeanMetrics(Evaluation):
    """The weighted mean of each metric that a task's loss returns.

    Attributes:
      batches: number of batches.
      means: name of a metric -> its mean; `perplexity` is added if there is a `cross_entropy`.
    """

    batches: int
    means: Mapping[str, float]

    @classmethod
    def measure(
        cls, runtime: EvaluationRuntime, batches: Iterable[dict[str, np.ndarray]]
    ) -> MeanMetrics:
        """Returns the means over batches; raises ValueError if there are none."""
        means, count = WeightedMeans(), 0
        for batch in batches:
            means.add(runtime.eval_step(batch))
            count += 1
        if not count:
            raise UserError("the split has no batches")
        found = means.means()
        if "cross_entropy" in found:
            found["perplexity"] = perplexity(found["cross_entropy"])
        return cls(count, found)

    @property
    def size(self) -> str:
        return f"{self.batches:,} batches"

    def to_record(self) -> dict[str, Any]:
        """Returns the number of batches and the means."""
        return {"batches": self.batches, **self.means}

    def table(self) -> Table:
        """Returns a row for each metric."""
        rows = [(name, f"{value:.4f}") for name, value in self.means.items()]
        return Table(("metric", "mean"), rows)


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Likelihood of the references, given their sources.

    Attributes:
      cross_entropy: nats per target token, EOS counted, without label smoothing. NaN if there are
        no tokens.
      accuracy: share of target tokens that the model finds most likely. NaN if there are no tokens.
      tokens: number of target tokens.
      rows_too_long: rows left out because they are longer than a row of a batch.
    """

    cross_entropy: float
    accuracy: float
    tokens: int
    rows_too_long: int

    @property
    def perplexity(self) -> float:
        """The perplexity of the model on a target token: exp(cross_entropy)."""
        return perplexity(self.cross_entropy)


def combined(parts: Iterable[Likelihood]) -> Likelihood:
    """Returns the likelihood of all rows of some parts; each token counts the same."""
    means, tokens, rows_too_long = WeightedMeans(), 0, 0
    for part in parts:
        if part.tokens:
            values = {"cross_entropy": part.cross_entropy, "accuracy": part.accuracy}
            means.add({name: (value, part.tokens) for name, value in values.items()})
        tokens += part.tokens
        rows_too_long += part.rows_too_long
    return _likelihood(means, tokens, rows_too_long)


def measure_likelihood(
    runtime: EvaluationRuntime,
    input_: PairInput,
    rows: Sequence[Row],
    progress: Progress = SILENT,
) -> Likelihood:
    """Returns how well the model predicts the targets of rows, packed as in training.

    Args:
      runtime: holds the weights.
      input_: packs the rows.
      rows: what to predict.
      progress: is told after each batch how many rows are done.
    """
    batches, rows_too_long = input_.pack_rows(rows)
    means, tokens, done = WeightedMeans(), 0, rows_too_long
    for batch in batches:
        means.add(runtime.eval_step(batch))
        tokens += int(np.count_nonzero(batch["target_segments"]))
        done += int(batch["target_segments"].max(axis=1).sum())
        progress.update(done)
    return _likelihood(means, tokens, rows_too_long)


def measure_by_language(
    runtime: EvaluationRuntime,
    input_: PairInput,
    rows: Sequence[Row],
    progress: Progress,
) -> dict[str, Likelihood]:
    """Returns source language -> the likelihood of its rows; see `measure_likelihood`."""
    found, before = {}, 0
    for language, members in rows_by_language(rows).items():
        part = PartProgress(progress, before)
        found[language] = measure_likelihood(runtime, input_, members, part)
        before += len(members)
    return found


def _likelihood(means: WeightedMeans, tokens: int, rows_too_long: int) -> Likelihood:
    found = {"cross_entropy": math.nan, "accuracy": math.nan, **means.means()}
    return Likelihood(found["cross_entropy"], found["accuracy"], tokens, rows_too_long)
