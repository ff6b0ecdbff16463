"""Adding a bias to every row."""

import tensorflow as tf


def add_bias(x: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Returns x + bias in x's type.

    It is computed in float32, so that the gradient of the bias, a sum over all rows, is, too.
    """
    return tf.cast(tf.cast(x, tf.float32) + tf.cast(bias, tf.float32), x.dtype)
