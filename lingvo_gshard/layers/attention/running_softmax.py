"""Softmax over keys that are processed in blocks, and its product with the values.

Rabe and Staats 2021, arXiv 2112.05682. The running sums, and the gradient from each query's largest
logit and sum, are those of Dao et al. 2022, arXiv 2205.14135, sections 3.1 and B.4.

The functions support any layout in which logits have the letters of the queries followed by that of
the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers.attention.soft_cap import soft_cap_gradient
from lingvo_gshard.sharding import annotate, einsum


class RunningSums(NamedTuple):
    """Float32 sums over the keys so far.

    Attributes:
      mixed: sum of exponentials times values, in the layout of the queries.
      largest: largest logit of each query, with a last dimension of 1.
      total: sum of the exponentials of each query, with a last dimension of 1.
    """

    mixed: tf.Tensor
    largest: tf.Tensor
    total: tf.Tensor

    def result(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the mean of the values, weighted by the softmax."""
        return tf.cast(self.mixed / self.total, dtype)

    def statistics(self, d_mixed: tf.Tensor, mixed: tf.Tensor) -> SoftmaxStatistics:
        """Returns the statistics that the gradient needs.

        Args:
          d_mixed: gradient of the result.
          mixed: the result.
        """
        product = tf.cast(d_mixed, tf.float32) * tf.cast(mixed, tf.float32)
        weighted_gradient = tf.reduce_sum(product, -1, keepdims=True)
        return SoftmaxStatistics(self.largest, 1.0 / self.total, weighted_gradient)


class SoftmaxStatistics(NamedTuple):
    """Float32 statistics of a softmax over all keys, one for each query.

    Attributes:
      largest: largest logit.
      inverse_total: 1 / the sum of the exponentials.
      weighted_gradient: sum over the keys of each weight times its gradient. It is computed as a
        sum over D.
    """

    largest: tf.Tensor
    inverse_total: tf.Tensor
    weighted_gradient: tf.Tensor


def empty_sums(
    query: tf.Tensor, value_dim: int, layout: str, sinks_N: tf.Tensor | None = None
) -> RunningSums:
    """Returns the sums over no keys, or over the sinks.

    Args:
      query: queries; the second dimension is N.
      value_dim: size of D of the values.
      layout: letters of the queries.
      sinks_N: float32 logits of keys without values; None for none.
    """
    shape = [*query.shape[:-1], 1]
    mixed = annotate(tf.zeros([*query.shape[:-1], value_dim], tf.float32), layout)
    if sinks_N is None:
        return RunningSums(mixed, tf.fill(shape, tf.float32.min), tf.zeros(shape, tf.float32))
    largest = tf.broadcast_to(_by_head(sinks_N, shape), shape)
    return RunningSums(mixed, largest, tf.ones(shape, tf.float32))


def sink_gradients(statistics: SoftmaxStatistics, sinks_N: tf.Tensor) -> tf.Tensor:
    """Returns the gradients [N] of the sinks' logits.

    Args:
      statistics: statistics of the softmax over all keys and the sinks.
      sinks_N: float32 logits of the sinks.
    """
    shape = statistics.largest.shape.as_list()
    weights = tf.exp(_by_head(sinks_N, shape) - statistics.largest) * statistics.inverse_total
    axes = [axis for axis in range(len(shape)) if axis != 1]
    return -tf.reduce_sum(weights * statistics.weighted_gradient, axes)


def _by_head(x_N: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns numbers by head with as many dimensions as `shape`, of which the second is N."""
    return tf.reshape(x_N, [1, -1, *[1] * (len(shape) - 2)])


def add_keys(sums: RunningSums, logits: tf.Tensor, values: tf.Tensor, equation: str) -> RunningSums:
    """Returns the sums with a block of keys added.

    Args:
      sums: sums over the keys so far.
      logits: float32 logits of the block.
      values: values of the block.
      equation: einsum equation from weights and values to the layout of queries, such as
        "BNLK,BNKD->BNLD".
    """
    largest = tf.maximum(sums.largest, tf.reduce_max(logits, -1, keepdims=True))
    exponentials = tf.exp(logits - largest)
    correction = tf.exp(sums.largest - largest)
    total = sums.total * correction + tf.reduce_sum(exponentials, -1, keepdims=True)
    block_mixed = einsum(equation, tf.cast(exponentials, values.dtype), values)
    layout = equation.rpartition(">")[2]
    mixed = annotate(sums.mixed * correction + tf.cast(block_mixed, tf.float32), layout)
    return RunningSums(mixed, largest, total)


def gradients(
    statistics: SoftmaxStatistics,
    logits: tf.Tensor,
    capped: tf.Tensor,
    d_weights: tf.Tensor,
    cap: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weights of a block, recomputed, and the gradients of its products q k.

    Both have the type of `d_weights`.

    Args:
      statistics: statistics of the softmax over all keys.
      logits: float32 logits of the block, with all biases.
      capped: logits of the block before any bias.
      d_weights: gradients of the weights.
      cap: see `soft_cap`.
    """
    weights = tf.exp(logits - statistics.largest) * statistics.inverse_total
    d_logits = weights * (tf.cast(d_weights, tf.float32) - statistics.weighted_gradient)
    d_logits = soft_cap_gradient(d_logits, capped, cap)
    return tf.cast(weights, d_weights.dtype), tf.cast(d_logits, d_weights.dtype)
