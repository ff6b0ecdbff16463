"""Means of metrics over the batches of a split: the evaluation that suits every task."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tasks.evaluation.evaluation import Evaluation, EvaluationRuntime, Table


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
