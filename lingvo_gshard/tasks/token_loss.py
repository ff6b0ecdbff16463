"""The loss and the metrics of a task that gives every token a distribution over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.losses import cross_entropy

# Name scope of what is computed from the logits.
LOSS_SCOPE = "loss"


def token_loss(
    logits_BLV: tf.Tensor,
    labels_BL: tf.Tensor,
    segments_BL: tf.Tensor,
    label_smoothing: float,
    z_loss_weight: float = 0.0,
    counted: Sequence[tf.Tensor] = (),
) -> tuple[tf.Tensor, NestedMap]:
    """Returns the scalar training loss and metrics, name -> (value, weight), of a packed batch.

    The loss is the label-smoothed cross-entropy per real token, in float32, plus the losses that
    layers have reported. counted: the segments of other rows whose tokens count as the batch's too.
    """
    with tf.name_scope(f"{LOSS_SCOPE}/"):
        sums = cross_entropy(logits_BLV, labels_BL, segments_BL, label_smoothing, z_loss_weight)
        tokens = tf.maximum(sums.tokens, 1.0)
        pass_under_way = context.current()
        loss = sums.smoothed / tokens + tf.add_n([0.0, *pass_under_way.losses.values()])
        metrics = NestedMap(pass_under_way.metrics)
        metrics.update(
            loss=(loss, tokens),
            cross_entropy=(sums.exact / tokens, tokens),
            accuracy=(sums.correct / tokens, tokens),
            tokens=(_count_tokens(segments_BL, *counted), tf.ones([])),
        )
        return loss, metrics


def _count_tokens(*segments: tf.Tensor) -> tf.Tensor:
    return tf.add_n(
        [tf.reduce_sum(tf.cast(tf.not_equal(each, 0), tf.float32)) for each in segments]
    )
