"""A softmax over keys that come one part after another, and the product of its weights with values.

Rabe and Staats 2021, arXiv 2112.05682; the sums under way and the gradient from a query's largest
logit and its sum are those of Dao et al. 2022, arXiv 2205.14135, sections 3.1 and B.4. Letters are
the caller's: logits have those of queries, then that of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from lingvo_gshard.layers.attention.soft_cap import soft_cap_gradient
from lingvo_gshard.sharding import annotate, einsum


class RunningSums(NamedTuple):
    """Float32 sums over the keys so far.

    mixed: of exponentials times values, in the layout of queries. largest, total: each query's
    largest logit and the sum of exponentials, with a last dimension of 1.
    """

    mixed: tf.Tensor
    largest: tf.Tensor
    total: tf.Tensor

    def result(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the values' mean, weighted by the softmax."""
        return tf.cast(self.mixed / self.total, dtype)

    def statistics(self, d_mixed: tf.Tensor, mixed: tf.Tensor) -> SoftmaxStatistics:
        """Returns what the gradient needs; d_mixed: that of the result, which is `mixed`."""
        product = tf.cast(d_mixed, tf.float32) * tf.cast(mixed, tf.float32)
        return SoftmaxStatistics(
            self.largest, 1.0 / self.total, tf.reduce_sum(product, -1, keepdims=True)
        )


class SoftmaxStatistics(NamedTuple):
    """What the gradient needs of a softmax over all keys, float32.

    largest, inverse: each query's largest logit, and 1 / its sum of exponentials. of_sum: the sum
    over keys of weights times their gradients, taken over D.
    """

    largest: tf.Tensor
    inverse: tf.Tensor
    of_sum: tf.Tensor


def empty_sums(query: tf.Tensor, layout: str) -> RunningSums:
    """Returns the sums over no keys; layout: of the query, whose last letter is D."""
    rows = [*query.shape[:-1], 1]
    return RunningSums(
        annotate(tf.zeros(query.shape, tf.float32), layout),
        tf.fill(rows, tf.float32.min),
        tf.zeros(rows, tf.float32),
    )


def add_keys(sums: RunningSums, logits: tf.Tensor, values: tf.Tensor, equation: str) -> RunningSums:
    """Returns the sums with more keys.

    equation: einsum letters of weights, of values, and of queries, such as "BNLK,BNKD->BNLD".
    """
    largest = tf.maximum(sums.largest, tf.reduce_max(logits, -1, keepdims=True))
    exponentials = tf.exp(logits - largest)
    fading = tf.exp(sums.largest - largest)
    total = sums.total * fading + tf.reduce_sum(exponentials, -1, keepdims=True)
    more = einsum(equation, tf.cast(exponentials, values.dtype), values)
    layout = equation.rpartition(">")[2]
    mixed = annotate(sums.mixed * fading + tf.cast(more, tf.float32), layout)
    return RunningSums(mixed, largest, total)


def gradients(
    statistics: SoftmaxStatistics,
    logits: tf.Tensor,
    capped: tf.Tensor,
    d_weights: tf.Tensor,
    cap: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns some keys' weights, computed once more, and the gradients of products q k.

    capped: logits before any bias; cap: of `soft_cap`. In the type of d_weights.
    """
    weights = tf.exp(logits - statistics.largest) * statistics.inverse
    d_logits = weights * (tf.cast(d_weights, tf.float32) - statistics.of_sum)
    d_logits = soft_cap_gradient(d_logits, capped, cap)
    return tf.cast(weights, d_weights.dtype), tf.cast(d_logits, d_weights.dtype)
