"""How well a model expects given translations: cross-entropy, perplexity, accuracy by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.api.run import TrainedModel
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.data.batching import packing
from lingvo_gshard.data.corpus_input import encode
from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.training.monitoring.metrics import WeightedMeans, perplexity


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Means over target tokens, EOS counted; cross-entropy in nats, without label smoothing."""

    cross_entropy: float
    perplexity: float
    accuracy: float
    tokens: int
    rows_too_long: int


def measure(
    params: Params,
    trained: TrainedModel,
    rows: Sequence[Row],
    on_progress: Callable[[int], None] | None = None,
) -> Expectation:
    """Returns the means over rows, packed as in training; rows longer than that allows are counted.

    on_progress: called with the number of rows done after each batch.
    """
    shape = (params.input.batch_rows, params.input.source_length, params.input.target_length)
    sources = encode([row.source for row in rows], trained.input.source_vocabulary)
    targets = encode([row.target for row in rows], trained.input.target_vocabulary)
    fits = (sources.lengths <= shape[1]) & (targets.lengths <= shape[2])
    means, tokens, done = WeightedMeans(), 0, int(np.count_nonzero(~fits))
    for batch in packing.batches_in_order(sources, targets, np.flatnonzero(fits), shape):
        means.add(trained.runtime.eval_step(batch))
        tokens += int(np.count_nonzero(batch["target_segments"]))
        done += int(batch["target_segments"].max(axis=1).sum())
        if on_progress:
            on_progress(done)
    found = {"cross_entropy": float("nan"), "accuracy": float("nan"), **means.means()}
    return Expectation(
        cross_entropy=found["cross_entropy"],
        perplexity=perplexity(found["cross_entropy"]),
        accuracy=found["accuracy"],
        tokens=tokens,
        rows_too_long=int(np.count_nonzero(~fits)),
    )
