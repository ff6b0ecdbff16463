"""Layouts of attention heads."""

from __future__ import annotations

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.sharding import annotate


def heads_first(x_BKND: tf.Tensor, layout: str = "BNKD") -> tf.Tensor:
    """Returns [B,N,K,D], which both products of attention read without another transposition.

    Args:
      x_BKND: queries, keys or values by position.
      layout: letters of the result. "BNLD" for queries, and for keys and values that stay sharded
        by position.
    """
    return annotate(tf.transpose(x_BKND, (0, 2, 1, 3)), layout)


def repeat_heads(x_BNKD: tf.Tensor, num_heads: int) -> tf.Tensor:
    """Returns keys or values with each head repeated so that there are `num_heads` in all."""
    times = num_heads // x_BNKD.shape[1]
    if times == 1:
        return x_BNKD

    # XLA does not infer the shapes of tf.repeat's own gradient within loops.
    @custom_gradient
    def compute(x_BNKD: tf.Tensor):
        batch, heads, length, head_dim = x_BNKD.shape

        def gradient(d_BNKD: tf.Tensor) -> tf.Tensor:
            grouped = tf.reshape(d_BNKD, [batch, heads, times, length, head_dim])
            return annotate(tf.reduce_sum(grouped, 2), "BNKD")

        return annotate(tf.repeat(x_BNKD, times, axis=1), "BNKD"), gradient

    return compute(x_BNKD)
