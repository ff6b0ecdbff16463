"""Adding a bias."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf


def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Returns x + bias in the type of x.

    The sum is computed in float32. So is the gradient of the bias, which sums over all rows.
    """
    return tf.cast(tf.cast(x, tf.float32) + tf.cast(bias, tf.float32), x.dtype)
