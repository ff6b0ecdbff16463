"""Label-smoothed cross-entropy over packed rows, in float32."""

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Sums over the real tokens of a batch, each a float32 scalar.

    smoothed: the loss to train on; exact: the negative log likelihood in nats; correct: tokens
    whose label has the largest logit; tokens: how many. Only `smoothed` has a gradient.
    """

    smoothed: tf.Tensor
    exact: tf.Tensor
    correct: tf.Tensor
    tokens: tf.Tensor


def cross_entropy(
    logits_BLV: tf.Tensor, labels_BL: tf.Tensor, mask_BL: tf.Tensor, label_smoothing: float
) -> CrossEntropy:
    """Returns sums over the positions where mask is not 0; padding counts nowhere.

    The target distribution is (1 - label_smoothing) on the label plus label_smoothing spread over
    the whole vocabulary. Szegedy et al. 2015, arXiv 1512.00567, section 7.
    """
    mask_BL = tf.cast(tf.not_equal(mask_BL, 0), tf.float32)
    smoothed_BL, exact_BL, correct_BL = _per_token(logits_BLV, labels_BL, label_smoothing)
    return CrossEntropy(
        smoothed=tf.reduce_sum(smoothed_BL * mask_BL),
        exact=tf.reduce_sum(tf.stop_gradient(exact_BL) * mask_BL),
        correct=tf.reduce_sum(tf.stop_gradient(correct_BL) * mask_BL),
        tokens=tf.reduce_sum(mask_BL),
    )


def _per_token(
    logits_BLV: tf.Tensor, labels_BL: tf.Tensor, label_smoothing: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Smoothed and exact loss, and whether the label's logit is the largest, by position.

    The gradient is written out so that it is one pass over [B,L,V] and needs no scatter.
    """

    @tf.custom_gradient
    def compute(logits_BLV: tf.Tensor):
        values_BLV = tf.cast(logits_BLV, tf.float32)
        is_label_BLV = tf.equal(tf.range(logits_BLV.shape[-1]), labels_BL[..., None])
        largest_BL = tf.reduce_max(values_BLV, -1)
        shifted_BLV = values_BLV - largest_BL[..., None]
        log_normaliser_BL = tf.math.log(tf.reduce_sum(tf.exp(shifted_BLV), -1))
        label_BL = tf.reduce_sum(tf.where(is_label_BLV, shifted_BLV, 0.0), -1)
        exact_BL = log_normaliser_BL - label_BL
        uniform_BL = log_normaliser_BL - tf.reduce_mean(shifted_BLV, -1)
        smoothed_BL = (1 - label_smoothing) * exact_BL + label_smoothing * uniform_BL
        correct_BL = tf.cast(label_BL >= 0, tf.float32)

        def gradient(d_smoothed_BL, d_exact_BL, d_correct_BL):
            del d_exact_BL, d_correct_BL
            probability_BLV = tf.exp(shifted_BLV - log_normaliser_BL[..., None])
            target_BLV = tf.where(is_label_BLV, 1 - label_smoothing, 0.0)
            target_BLV += label_smoothing / logits_BLV.shape[-1]
            d_logits_BLV = (probability_BLV - target_BLV) * d_smoothed_BL[..., None]
            return tf.cast(d_logits_BLV, logits_BLV.dtype)

        return (smoothed_BL, exact_BL, correct_BL), gradient

    return compute(logits_BLV)
