"""Likelihood: how well a model predicts the references of rows, given their sources."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from lingvo_gshard.core import SILENT, PartProgress, Progress
from lingvo_gshard.data import PairInput, Row, rows_by_language
from lingvo_gshard.tasks import EvaluationRuntime, WeightedMeans, perplexity


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
    runtime: EvaluationRuntime, input_: PairInput, rows: Sequence[Row], progress: Progress = SILENT
) -> Likelihood:
    """Returns how well the model predicts the targets of rows, packed as in training."""
    batches, rows_too_long = input_.pack_rows(rows)
    means, tokens, done = WeightedMeans(), 0, rows_too_long
    for batch in batches:
        means.add(runtime.eval_step(batch))
        tokens += int(np.count_nonzero(batch["target_segments"]))
        done += int(batch["target_segments"].max(axis=1).sum())
        progress.update(done)
    return _likelihood(means, tokens, rows_too_long)


def measure_by_language(
    runtime: EvaluationRuntime, input_: PairInput, rows: Sequence[Row], progress: Progress
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
