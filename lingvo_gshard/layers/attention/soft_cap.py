"""Soft caps: logits kept within (-c, c) by a tanh. Gemma 2, arXiv 2408.00118, section 2."""

import tensorflow as tf


def soft_cap(x: tf.Tensor, cap: float) -> tf.Tensor:
    """Returns c tanh(x / c); x where c is 0."""
    return cap * tf.tanh(x / cap) if cap else x


def soft_cap_gradient(d: tf.Tensor, capped: tf.Tensor, cap: float) -> tf.Tensor:
    """Returns the gradient of `soft_cap`'s argument; d: that of its result, `capped`."""
    return d * tf.cast(1.0 - tf.square(capped / cap), d.dtype) if cap else d
