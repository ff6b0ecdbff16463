"""Label-smoothed cross-entropy over packed rows, computed in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from lingvo_gshard.core import Seam, custom_gradient, tf


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Float32 sums over the tokens of a batch, without padding. Only `smoothed` has a gradient.

    Attributes:
      smoothed: training loss, with label smoothing and z-loss.
      exact: negative log likelihood, in nats.
      correct: number of tokens whose label has the largest logit.
    """

    smoothed: tf.Tensor
    exact: tf.Tensor
    correct: tf.Tensor
    tokens: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Objective:
    """Labels, and how a loss is computed from products x W.

    Attributes:
      labels_BL: integer labels in [0, V).
      mask_BL: 0 in padding.
      label_smoothing: see `cross_entropy`.
      z_loss_weight: see `cross_entropy`.
      cap: see `dense.soft_cap`. It follows the bias.
      bias_V: bias of the logits; None for none.
    """

    labels_BL: tf.Tensor
    mask_BL: tf.Tensor
    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0
    cap: float = 0.0
    bias_V: tf.Tensor | None = None


# Returns the sums of `cross_entropy` for the logits x W, given x, W, the letters of W, MV or VM,
# and how the loss is computed.
LossOfProducts: TypeAlias = "Callable[[tf.Tensor, tf.Tensor, str, Objective], CrossEntropy]"

# A feature returns a loss that never has all logits, or None to leave it to others. It is given the
# option `logits_positions` of tasks, the activations that the softmax reads, and the size of V.
LONG_LOSSES: Seam[Callable[[int, tf.Tensor, int], LossOfProducts | None]] = Seam("long_losses")


def loss_without_logits(
    wanted: int, x_BLM: tf.Tensor, vocabulary_size: int
) -> LossOfProducts | None:
    """Returns a loss that never has all logits; None if all logits are computed at once.

    Args:
      wanted: number of positions of a device whose logits exist at once. 0 decides by size.
    """
    found = (feature(wanted, x_BLM, vocabulary_size) for feature in LONG_LOSSES)
    return next(filter(None, found), None)


def cross_entropy(
    logits_BLV: tf.Tensor,
    labels_BL: tf.Tensor,
    mask_BL: tf.Tensor,
    label_smoothing: float,
    z_loss_weight: float = 0.0,
) -> CrossEntropy:
    """Returns sums of losses over the positions whose mask is not 0.

    The target distribution has a probability of 1 - label_smoothing on the label, plus
    label_smoothing spread evenly over the vocabulary (Szegedy et al. 2015, arXiv 1512.00567,
    section 7).

    Args:
      labels_BL: integer labels in [0, V).
      mask_BL: 0 in padding.
      label_smoothing: probability that is spread over the vocabulary.
      z_loss_weight: weight of log^2 Z, added to `smoothed`, where Z is the sum of the exponentials
        of a position's logits. It keeps logits from drifting (arXiv 2204.02311, section 5).
    """
    is_real_BL = tf.not_equal(mask_BL, 0)

    def total(x_BL: tf.Tensor) -> tf.Tensor:
        # The loss of padding may overflow, and infinity times 0 is no number.
        return tf.reduce_sum(tf.where(is_real_BL, x_BL, 0.0))

    smoothed_BL, exact_BL, correct_BL = per_token(
        logits_BLV, labels_BL, label_smoothing, z_loss_weight
    )
    return CrossEntropy(
        smoothed=total(smoothed_BL),
        exact=total(tf.stop_gradient(exact_BL)),
        correct=total(tf.stop_gradient(correct_BL)),
        tokens=tf.reduce_sum(tf.cast(is_real_BL, tf.float32)),
    )


def per_token(
    logits_BLV: tf.Tensor, labels_BL: tf.Tensor, label_smoothing: float, z_loss_weight: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the smoothed loss, the exact loss and the correctness [B,L] of each position.

    Only the smoothed loss has a gradient. It is written by hand: it is one pass over [B,L,V] and
    needs no scatter.

    Args:
      labels_BL: integer labels in [0, V).
      label_smoothing: see `cross_entropy`.
      z_loss_weight: see `cross_entropy`.
    """

    @custom_gradient
    def compute(logits_BLV: tf.Tensor):
        values_BLV = tf.cast(logits_BLV, tf.float32)
        largest_BL = tf.reduce_max(values_BLV, -1)
        exponentials_BLV = tf.exp(values_BLV - largest_BL[..., None])
        sum_BL = tf.reduce_sum(exponentials_BLV, -1)
        # XLA for TPU stores the operand of a gather, which is larger in float32.
        label_BL = tf.cast(tf.gather(logits_BLV, labels_BL, batch_dims=2), tf.float32)
        log_normalizer_BL = largest_BL + tf.math.log(sum_BL)
        exact_BL = log_normalizer_BL - label_BL
        uniform_BL = log_normalizer_BL - tf.reduce_mean(values_BLV, -1)
        smoothed_BL = (1 - label_smoothing) * exact_BL + label_smoothing * uniform_BL
        if z_loss_weight:
            smoothed_BL += z_loss_weight * tf.square(log_normalizer_BL)
        correct_BL = tf.cast(tf.equal(label_BL, largest_BL), tf.float32)

        def gradient(d_smoothed_BL, d_exact_BL, d_correct_BL):
            del d_exact_BL, d_correct_BL
            scale_BL = d_smoothed_BL / sum_BL
            if z_loss_weight:
                scale_BL *= 1 + 2 * z_loss_weight * log_normalizer_BL
            scale_BL1, d_BL1 = scale_BL[..., None], d_smoothed_BL[..., None]
            is_label_BLV = tf.equal(tf.range(logits_BLV.shape[-1]), labels_BL[..., None])
            target_BLV = tf.where(is_label_BLV, (1 - label_smoothing) * d_BL1, 0.0)
            target_BLV += label_smoothing / logits_BLV.shape[-1] * d_BL1
            d_logits_BLV = exponentials_BLV * scale_BL1 - target_BLV
            # Padding has no gradient, even if its logits are not finite.
            d_logits_BLV = tf.where(tf.equal(d_BL1, 0.0), 0.0, d_logits_BLV)
            return tf.cast(d_logits_BLV, logits_BLV.dtype)

        return (smoothed_BL, exact_BL, correct_BL), gradient

    return compute(logits_BLV)
