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
