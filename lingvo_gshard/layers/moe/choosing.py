"""Choosing: the best experts of each token, one after another."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.sharding import annotate

# Below any score.
_EXCLUDED = -float("inf")


def best(
    scores_GSE: tf.Tensor, excluded_GSE: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (index int32 [G,S], one-hot [G,S,E]) of the largest score not excluded.

    excluded: larger than 0 at experts that are not to be chosen. Of equal ones the first is chosen.
    """
    if excluded_GSE is not None:
        scores_GSE = tf.where(excluded_GSE > 0, _EXCLUDED, scores_GSE)
    expert_GS = tf.argmax(scores_GSE, -1, output_type=tf.int32)
    return expert_GS, annotate(tf.one_hot(expert_GS, scores_GSE.shape[-1]), "GSE")


def best_few(scores_GSE: tf.Tensor, count: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns what `best` does for the `count` largest scores, the largest first."""
    chosen: list[tuple[tf.Tensor, tf.Tensor]] = []
    excluded_GSE = None
    for _ in range(count):
        chosen.append(best(scores_GSE, excluded_GSE))
        excluded_GSE = tf.add_n([one_hot_GSE for _, one_hot_GSE in chosen])
    return chosen


def value_at(values_GSE: tf.Tensor, chosen_GSE: tf.Tensor) -> tf.Tensor:
    """Returns [G,S], the values at a one-hot choice."""
    return tf.reduce_sum(values_GSE * chosen_GSE, -1)
