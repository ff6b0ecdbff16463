"""Likelihood of references under a translation model: cross-entropy, perplexity and accuracy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lingvo_gshard.data.sources.row import Row, rows_by_language
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.tasks.evaluation.evaluation import EvaluationRuntime
from lingvo_gshard.tasks.evaluation.means import WeightedMeans, perplexity


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
    input_: TranslationInput,
    rows: Sequence[Row],
    on_progress: Callable[[int], None] | None = None,
) -> Likelihood:
    """Returns how well the model predicts the targets of rows, packed as in training.

    Args:
      runtime: holds the weights.
      input_: packs the rows.
      rows: what to predict.
      on_progress: called after each batch with the number of rows done.
    """
    batches, rows_too_long = input_.pack_rows(rows)
    means, tokens, done = WeightedMeans(), 0, rows_too_long
    for batch in batches:
        means.add(runtime.eval_step(batch))
        tokens += int(np.count_nonzero(batch["target_segments"]))
        done += int(batch["target_segments"].max(axis=1).sum())
        if on_progress:
            on_progress(done)
    return _likelihood(means, tokens, rows_too_long)


def measure_by_language(
    runtime: EvaluationRuntime,
    input_: TranslationInput,
    rows: Sequence[Row],
    on_progress: Callable[[int], None],
) -> dict[str, Likelihood]:
    """Returns source language -> the likelihood of its rows; see `measure_likelihood`."""
    found, before = {}, 0
    for language, members in rows_by_language(rows).items():
        found[language] = measure_likelihood(
            runtime, input_, members, lambda done, before=before: on_progress(before + done)
        )
        before += len(members)
    return found


def _likelihood(means: WeightedMeans, tokens: int, rows_too_long: int) -> Likelihood:
    found = {"cross_entropy": math.nan, "accuracy": math.nan, **means.means()}
    return Likelihood(found["cross_entropy"], found["accuracy"], tokens, rows_too_long)
