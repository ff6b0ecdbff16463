"""Loss and metrics of a task that predicts tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.losses import cross_entropy

# Name scope of the operations that compute the loss from the logits.
LOSS_SCOPE = "loss"


def token_loss(
    logits_BLV: tf.Tensor,
    labels_BL: tf.Tensor,
    segments_BL: tf.Tensor,
    label_smoothing: float,
    z_loss_weight: float = 0.0,
    more_segments: Sequence[tf.Tensor] = (),
) -> tuple[tf.Tensor, NestedMap]:
    """Returns the training loss of a packed batch and its metrics.

    The loss is the float32 label-smoothed cross-entropy per token that is no padding, plus the
    losses that layers reported to the context.

    Args:
      logits_BLV: logits of each position.
      labels_BL: int32 ids to predict.
      segments_BL: int32 segments, 0 in padding.
      label_smoothing: probability spread evenly over the vocabulary.
      z_loss_weight: weight of log^2 Z, where Z is the sum of exp(logits).
      more_segments: segments of further arrays, such as the source's, whose tokens are added to
        the metric `tokens`.

    Returns:
      The scalar loss and metrics: name -> (value, weight).
    """
    with tf.name_scope(f"{LOSS_SCOPE}/"):
        sums = cross_entropy(logits_BLV, labels_BL, segments_BL, label_smoothing, z_loss_weight)
        tokens = tf.maximum(sums.tokens, 1.0)
        current = context.current()
        loss = sums.smoothed / tokens + tf.add_n([0.0, *current.losses.values()])
        metrics = NestedMap(current.metrics)
        # A batch of padding alone weighs nothing where batches are averaged.
        metrics.update(
            loss=(loss, sums.tokens),
            cross_entropy=(sums.exact / tokens, sums.tokens),
            accuracy=(sums.correct / tokens, sums.tokens),
            tokens=(_count_tokens(segments_BL, *more_segments), tf.ones([])),
        )
        return loss, metrics


def _count_tokens(*segments: tf.Tensor) -> tf.Tensor:
    """Returns the number of positions that are no padding, as a float32 scalar."""
    return tf.add_n(
        [tf.reduce_sum(tf.cast(tf.not_equal(each, 0), tf.float32)) for each in segments]
    )
