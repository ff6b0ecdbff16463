"""BlockwiseKernel: attention over blocks of keys, without a tensor of queries by keys.

The method is by Rabe and Staats 2021, arXiv 2112.05682. The running sums follow Dao et al. 2022,
arXiv 2205.14135, section 3.1. The gradient needs only the largest logit and the sum of each query
(section B.4).

The functions support any layout whose logits have the letters of the queries, then the letter of
the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lingvo_gshard.core import Params, custom_gradient, known_sizes, tf
from lingvo_gshard.layers import (
    BLOCK_PADDING,
    PLAIN,
    AttentionKernel,
    AttentionMask,
    DropoutMask,
    SoftmaxOptions,
    repeat_heads,
    soft_cap,
    soft_cap_gradient,
)
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
        """Returns the statistics that the gradient needs."""
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
      sinks_N: float32 logits of keys without values; None for none.
    """
    shape = [*query.shape[:-1], 1]
    mixed = annotate(tf.zeros([*query.shape[:-1], value_dim], tf.float32), layout)
    if sinks_N is None:
        return RunningSums(mixed, tf.fill(shape, tf.float32.min), tf.zeros(shape, tf.float32))
    largest = tf.broadcast_to(_by_head(sinks_N, shape), shape)
    return RunningSums(mixed, largest, tf.ones(shape, tf.float32))


def sink_gradients(statistics: SoftmaxStatistics, sinks_N: tf.Tensor) -> tf.Tensor:
    """Returns the gradients [N] of the sinks' float32 logits, which the statistics include."""
    shape = statistics.largest.shape.as_list()
    weights = tf.exp(_by_head(sinks_N, shape) - statistics.largest) * statistics.inverse_total
    axes = [axis for axis in range(len(shape)) if axis != 1]
    return -tf.reduce_sum(weights * statistics.weighted_gradient, axes)


def _by_head(x_N: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Returns numbers by head, reshaped to the rank of `shape` with N as the second dimension."""
    return tf.reshape(x_N, [1, -1, *[1] * (len(shape) - 2)])


def add_keys(
    sums: RunningSums,
    logits: tf.Tensor,
    values: tf.Tensor,
    equation: str,
    dropout: tf.Tensor | float = 1.0,
) -> RunningSums:
    """Returns the sums with a block of keys added.

    Args:
      logits: float32 logits of the block.
      equation: einsum equation from weights and values to the layout of queries, such as
        "BNLK,BNKD->BNLD".
      dropout: factors of the weights, in the type of the values.
    """
    largest = tf.maximum(sums.largest, tf.reduce_max(logits, -1, keepdims=True))
    exponentials = tf.exp(logits - largest)
    correction = tf.exp(sums.largest - largest)
    total = sums.total * correction + tf.reduce_sum(exponentials, -1, keepdims=True)
    block_mixed = einsum(equation, tf.cast(exponentials, values.dtype) * dropout, values)
    layout = equation.rpartition(">")[2]
    mixed = annotate(sums.mixed * correction + tf.cast(block_mixed, tf.float32), layout)
    return RunningSums(mixed, largest, total)


def gradients(
    statistics: SoftmaxStatistics,
    logits: tf.Tensor,
    capped: tf.Tensor,
    d_weights: tf.Tensor,
    cap: float,
    dropout: tf.Tensor | float = 1.0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weights of a block, recomputed, and the gradients of its products q k.

    Both have the type of `d_weights`. Weights that are dropped are 0.

    Args:
      logits: float32 logits of the block, with all biases.
      capped: logits of the block before any bias.
      dropout: factors of the weights, in the type of `d_weights`.
    """
    weights = tf.exp(logits - statistics.largest) * statistics.inverse_total
    d_logits = tf.cast(d_weights * dropout, tf.float32) - statistics.weighted_gradient
    d_logits *= weights
    d_logits = soft_cap_gradient(d_logits, capped, cap)
    return tf.cast(weights, d_weights.dtype) * dropout, tf.cast(d_logits, d_weights.dtype)


class BlockwiseKernel(AttentionKernel):
    """Attends to one block of keys at a time, in the forward and in the backward pass.

    The backward pass recomputes the attention weights. The kernel also computes blocks that a
    causal mask hides completely.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("block_size", 512, "Keys of a block.", minimum=1)
        return p

    def attend(
        self,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        softmax: SoftmaxOptions = PLAIN,
    ) -> tf.Tensor:
        """Returns the attention output [B,N,L,D], as the base class describes."""
        keys = keys_BNKD.shape[2]
        size = min(self.p.block_size, keys)
        count = -(-keys // size)
        padding = [[0, 0], [0, count * size - keys]]

        # Segments, and the key of dropout, are arguments: TensorFlow does not capture a tensor that
        # only a loop in a gradient reads.
        @custom_gradient
        def compute(
            query_BNLD: tf.Tensor,
            keys_BNKD: tf.Tensor,
            values_BNKD: tf.Tensor,
            segments_BL: tf.Tensor,
            key_segments_BK: tf.Tensor,
            *others: tf.Tensor,
        ):
            dropout, sinks = split_dropout(softmax, others)
            by_key = [[0, 0], *padding, [0, 0]]
            keys_BNKD, values_BNKD = (tf.pad(x, by_key) for x in (keys_BNKD, values_BNKD))
            segments_BK = tf.pad(key_segments_BK, padding, constant_values=BLOCK_PADDING)
            tensors = query_BNLD, keys_BNKD, values_BNKD, segments_BL, segments_BK
            blocks = _Blocks(mask, softmax.cap, dropout, size, keys, *tensors)
            sums = blocks.forward(*sinks)
            mixed_BNLD = sums.result(query_BNLD.dtype)

            def gradient(d_BNLD: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
                statistics = sums.statistics(d_BNLD, mixed_BNLD)
                d_query, d_keys, d_values = blocks.backward(d_BNLD, statistics)
                d_arrays = d_query, d_keys[:, :, :keys], d_values[:, :, :keys]
                d_sinks = [sink_gradients(statistics, x_N) for x_N in sinks]
                return *d_arrays, None, None, *[None] * (len(others) - len(sinks)), *d_sinks

            return mixed_BNLD, gradient

        segments_BL, key_segments_BK = mask.explicit_segments(query_BNLD, keys_BNKD)
        return compute(
            query_BNLD,
            *(repeat_heads(x, query_BNLD.shape[1]) for x in (keys_BNKD, values_BNKD)),
            annotate(segments_BL, "BL", reserved="N"),
            annotate(key_segments_BK, "BK", reserved="N"),
            *dropout_and_sinks(softmax),
        )


def dropout_and_sinks(softmax: SoftmaxOptions) -> list[tf.Tensor]:
    """Returns the tensors of a softmax' options: the key of dropout, then the sinks."""
    dropout = [] if softmax.dropout is None else [softmax.dropout.key]
    return dropout + ([] if softmax.sinks_N is None else [softmax.sinks_N])


def split_dropout(
    softmax: SoftmaxOptions, tensors: Sequence[tf.Tensor]
) -> tuple[DropoutMask | None, Sequence[tf.Tensor]]:
    """Returns the dropout, whose key is one of the tensors, and the sinks among them."""
    if softmax.dropout is None:
        return None, tensors
    return dataclasses.replace(softmax.dropout, key=tensors[0]), tensors[1:]


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Tensors of one call whose keys divide into blocks.

    Attributes:
      dropout: which weights are dropped; None for none.
      size: keys of a block.
      keys: number of keys, without padding.
      query_BNLD: scaled queries.
      keys_BNKD: keys, padded to whole blocks.
      values_BNKD: values, padded likewise.
      segments_BK: segments of the keys, `BLOCK_PADDING` in padding.
    """

    mask: AttentionMask
    cap: float
    dropout: DropoutMask | None
    size: int
    keys: int
    query_BNLD: tf.Tensor
    keys_BNKD: tf.Tensor
    values_BNKD: tf.Tensor
    segments_BL: tf.Tensor
    segments_BK: tf.Tensor

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-self.keys // self.size)

    def forward(self, sinks_N: tf.Tensor | None = None) -> RunningSums:
        """Returns the sums over all keys, and the sinks."""

        def body(index: tf.Tensor, sums: RunningSums) -> tuple:
            logits_BNLK, _ = self._logits(index)
            values_BNKD = self._block(self.values_BNKD, index)
            equation, dropout_BNLK = "BNLK,BNKD->BNLD", self._dropout(index)
            return index + 1, add_keys(sums, logits_BNLK, values_BNKD, equation, dropout_BNLK)

        value_dim = self.values_BNKD.shape[-1]
        sums = empty_sums(self.query_BNLD, value_dim, "BNLD", sinks_N)
        start = (tf.constant(0), sums)
        return self._while(body, start)[1]

    def backward(
        self, d_BNLD: tf.Tensor, statistics: SoftmaxStatistics
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the gradients of queries, keys and values. Recomputes the attention weights."""

        def body(
            index: tf.Tensor, d_query: tf.Tensor, d_keys: tf.TensorArray, d_values: tf.TensorArray
        ) -> tuple:
            keys_BNKD, values_BNKD = (
                self._block(x, index) for x in (self.keys_BNKD, self.values_BNKD)
            )
            logits_BNLK, capped_BNLK = self._logits(index)
            d_weights_BNLK = einsum("BNLD,BNKD->BNLK", d_BNLD, values_BNKD)
            weights_BNLK, d_logits_BNLK = gradients(
                statistics, logits_BNLK, capped_BNLK, d_weights_BNLK, self.cap, self._dropout(index)
            )
            d_query_BNLD = einsum("BNLK,BNKD->BNLD", d_logits_BNLK, keys_BNKD)
            d_query = annotate(d_query + tf.cast(d_query_BNLD, tf.float32), "BNLD")
            d_keys_BNKD = einsum("BNLK,BNLD->BNKD", d_logits_BNLK, self.query_BNLD)
            d_values_BNKD = einsum("BNLK,BNLD->BNKD", weights_BNLK, d_BNLD)
            d_keys = d_keys.write(index, d_keys_BNKD)
            return index + 1, d_query, d_keys, d_values.write(index, d_values_BNKD)

        d_query = annotate(tf.zeros(self.query_BNLD.shape, tf.float32), "BNLD")
        stacks = (self._stack(x) for x in (self.keys_BNKD, self.values_BNKD))
        start = (tf.constant(0), d_query, *stacks)
        _, d_query, d_keys, d_values = self._while(body, start)
        d_query = tf.cast(d_query, self.query_BNLD.dtype)
        return d_query, _join(d_keys, self.keys_BNKD), _join(d_values, self.values_BNKD)

    def _logits(self, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a block's float32 logits [B,N,L,K], with and without the bias of the mask."""
        keys_BNKD = self._block(self.keys_BNKD, index)
        products_BNLK = einsum("BNLD,BNKD->BNLK", self.query_BNLD, keys_BNKD)
        capped_BNLK = soft_cap(tf.cast(products_BNLK, tf.float32), self.cap)
        return capped_BNLK + self._bias(index), capped_BNLK

    def _bias(self, index: tf.Tensor) -> tf.Tensor:
        """Returns the bias [B,1,L,K] of a block."""
        start = [0, index * self.size]
        size = [self.segments_BK.shape[0], self.size]
        keys_B1K = tf.slice(self.segments_BK, start, size)[:, None, :]
        query_BL1 = self.segments_BL[:, :, None]
        query_L, first = tf.range(query_BL1.shape[1]), index * self.size
        distances_LK = first + tf.range(self.size)[None, :] - query_L[:, None]
        bias_BLK = self.mask.block_bias(query_BL1, keys_B1K, distances_LK)
        return bias_BLK[:, None]

    def _dropout(self, index: tf.Tensor) -> tf.Tensor | float:
        """Returns the factors [B,N,L,K] of the weights of a block."""
        if self.dropout is None:
            return 1.0
        shape = [*known_sizes(self.query_BNLD.shape)[:3], self.keys]
        rows_B, heads_N, queries_L, _ = self.dropout.index_terms(shape)
        keys_K = tf.cast(index * self.size + tf.range(self.size), tf.uint32)
        index_NLK = heads_N[:, None, None] + queries_L[:, None] + keys_K
        return self.dropout.factors_at(
            rows_B[:, None, None, None] + index_NLK, self.values_BNKD.dtype
        )

    def _block(self, x_BNKD: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        batch, heads, _, head_dim = x_BNKD.shape
        size = self.size
        return annotate(
            tf.slice(x_BNKD, [0, 0, index * size, 0], [batch, heads, size, head_dim]), "BNKD"
        )

    def _stack(self, x_BNKD: tf.Tensor) -> tf.TensorArray:
        """Returns an array for the blocks of a gradient of keys or values."""
        batch, heads, _, head_dim = x_BNKD.shape
        shape = [batch, heads, self.size, head_dim]
        return tf.TensorArray(x_BNKD.dtype, self.count, element_shape=shape)

    def _while(self, body: Callable, start: tuple) -> tuple:
        count = self.count
        return tf.while_loop(lambda index, *_: index < count, body, start, maximum_iterations=count)


def _join(stack: tf.TensorArray, x_BNKD: tf.Tensor) -> tf.Tensor:
    """Returns the concatenated blocks of a stack, in the shape of x [B,N,K,D]."""
    blocks = tf.transpose(stack.stack(), (1, 2, 0, 3, 4))
    return annotate(tf.reshape(blocks, x_BNKD.shape), "BNKD")
