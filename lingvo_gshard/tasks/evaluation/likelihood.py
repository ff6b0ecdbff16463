"""How well a translation model predicts references: cross-entropy, perplexity and accuracy."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.data.translation_input import TranslationInput
from lingvo_gshard.tasks.evaluation.evaluation import EvaluationRuntime
from lingvo_gshard.tasks.evaluation.means import WeightedMeans, perplexity


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """How well a model predicts the references, given their sources.

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
        """exp of the cross-entropy."""
        return perplexity(self.cross_entropy)


def combined(parts: Iterable[Likelihood]) -> Likelihood:
    """Returns the likelihood of all rows of some parts; each token counts the same."""
    parts = list(parts)
    counted = [part for part in parts if part.tokens]
    tokens = sum(part.tokens for part in counted)
    return Likelihood(
        cross_entropy=_mean([(part.cross_entropy, part.tokens) for part in counted]),
        accuracy=_mean([(part.accuracy, part.tokens) for part in counted]),
        tokens=tokens,
        rows_too_long=sum(part.rows_too_long for part in parts),
    )


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
    found = {"cross_entropy": math.nan, "accuracy": math.nan, **means.means()}
    return Likelihood(found["cross_entropy"], found["accuracy"], tokens, rows_too_long)


def measure_by_language(
    runtime: EvaluationRuntime,
    input_: TranslationInput,
    rows: Sequence[Row],
    on_progress: Callable[[int], None],
) -> dict[str, Likelihood]:
    """Returns source language -> the likelihood of its rows; see `measure_likelihood`."""
    by_language = collections.defaultdict(list)
    for row in rows:
        by_language[row.language].append(row)
    found, before = {}, 0
    for language, members in by_language.items():
        found[language] = measure_likelihood(
            runtime, input_, members, lambda done, before=before: on_progress(before + done)
        )
        before += len(members)
    return found


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    weight = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / weight if weight else math.nan
