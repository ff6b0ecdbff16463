"""Soft caps: a tanh that keeps logits within (-c, c). Gemma 2, arXiv 2408.00118, section 2."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf


def soft_cap(x: tf.Tensor, cap: float) -> tf.Tensor:
    """Returns c tanh(x / c), or x if the cap c is 0."""
    return cap * tf.tanh(x / cap) if cap else x


def soft_cap_gradient(d_capped: tf.Tensor, capped: tf.Tensor, cap: float) -> tf.Tensor:
    """Returns the gradient of the argument of `soft_cap`.

    Args:
      d_capped: gradient of its result.
      capped: its result.
      cap: the cap; 0 for none.
    """
    return d_capped * tf.cast(1.0 - tf.square(capped / cap), d_capped.dtype) if cap else d_capped
