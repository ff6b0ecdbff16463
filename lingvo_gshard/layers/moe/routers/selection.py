"""Top-k selection over experts by repeated argmax, which yields the one-hots that routers need."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.sharding import annotate

# Smaller than any score.
_EXCLUDED = -float("inf")


def top_1(
    scores_GSE: tf.Tensor, excluded_GSE: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the expert with the largest score. Ties go to the first expert.

    Args:
      scores_GSE: the score of each expert for each token.
      excluded_GSE: larger than 0 at experts that must not be selected.

    Returns:
      Its index, int32 [G,S], and its one-hot, float32 [G,S,E].
    """
    if excluded_GSE is not None:
        scores_GSE = tf.where(excluded_GSE > 0, _EXCLUDED, scores_GSE)
    expert_GS = tf.argmax(scores_GSE, -1, output_type=tf.int32)
    return expert_GS, annotate(tf.one_hot(expert_GS, scores_GSE.shape[-1]), "GSE")


def top_k(scores_GSE: tf.Tensor, k: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns (index, one-hot) of the k largest scores, largest first; see `top_1`."""
    selected: list[tuple[tf.Tensor, tf.Tensor]] = []
    excluded_GSE = None
    for _ in range(k):
        selected.append(top_1(scores_GSE, excluded_GSE))
        excluded_GSE = sum_of_one_hots(selected)
    return selected


def sum_of_one_hots(selected: list[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
    """Returns [G,S,E]: 1 at every selected expert, 0 elsewhere."""
    return tf.add_n([one_hot_GSE for _, one_hot_GSE in selected])


def value_at(values_GSE: tf.Tensor, one_hot_GSE: tf.Tensor) -> tf.Tensor:
    """Returns [G,S]: the value at the selected expert of each token."""
    return tf.reduce_sum(values_GSE * one_hot_GSE, -1)
