"""Attention over one block of keys after another: no tensor of queries by keys, either way.

Rabe and Staats 2021, arXiv 2112.05682; the sums under way are those of running_softmax.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.attention import running_softmax
from lingvo_gshard.layers.attention.mask import BEHIND, block_bias
from lingvo_gshard.layers.attention.running_softmax import Done, Sums
from lingvo_gshard.layers.attention.soft_cap import soft_cap
from lingvo_gshard.sharding import annotate, einsum


def check(p: Params, path: str) -> None:
    """Raises ValueError naming the Params of an attention that cannot be computed in blocks."""
    if p.block_size < 0:
        raise ValueError(f"{path}.block_size: {p.block_size} is negative")
    for name in ("dropout_rate", "relative_buckets"):
        if p.block_size and p.get(name):
            raise ValueError(
                f"{path}.block_size: {p.block_size} with {path}.{name}, {p.get(name)}; blocks have "
                "none, 0 was expected of one of them"
            )


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Which keys a query sees, and how they are divided.

    segments_BL, key_segments_BK: as of `segment_bias`. block_size: keys of a block.
    """

    segments_BL: tf.Tensor
    key_segments_BK: tf.Tensor
    block_size: int
    is_causal: bool
    window: int
    cap: float

    @property
    def size(self) -> int:
        """How many keys a block has."""
        return min(self.block_size, self.key_segments_BK.shape[1])

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-self.key_segments_BK.shape[1] // self.size)

    def attend(
        self, query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor, values_BNKD: tf.Tensor
    ) -> tf.Tensor:
        """Returns softmax(q k + bias) v [B,N,L,D]; sums and the softmax are float32."""
        filled = self.count * self.size - keys_BNKD.shape[2]
        behind = [[0, 0], [0, filled]]

        # Segments are arguments: TensorFlow does not find what only a loop in a gradient reads.
        @custom_gradient
        def compute(
            query_BNLD: tf.Tensor,
            keys_BNKD: tf.Tensor,
            values_BNKD: tf.Tensor,
            segments_BL: tf.Tensor,
            key_segments_BK: tf.Tensor,
        ):
            keys, values = (tf.pad(x, [[0, 0], *behind, [0, 0]]) for x in (keys_BNKD, values_BNKD))
            segments_BK = tf.pad(key_segments_BK, behind, constant_values=BEHIND)
            run = _Run(self, query_BNLD, keys, values, segments_BL, segments_BK)
            sums = run.forward()
            mixed_BNLD = sums.result(query_BNLD.dtype)

            def gradient(d_BNLD: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
                d_query, d_keys, d_values = run.backward(d_BNLD, sums.done(d_BNLD, mixed_BNLD))
                length = keys_BNKD.shape[2]
                return d_query, d_keys[:, :, :length], d_values[:, :, :length], None, None

            return mixed_BNLD, gradient

        segments_BL = annotate(self.segments_BL, "BL", reserved="N")
        key_segments_BK = annotate(self.key_segments_BK, "BK", reserved="N")
        return compute(query_BNLD, keys_BNKD, values_BNKD, segments_BL, key_segments_BK)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Blocks of tensors whose keys divide into them."""

    blocks: Blocks
    query_BNLD: tf.Tensor
    keys_BNKD: tf.Tensor
    values_BNKD: tf.Tensor
    segments_BL: tf.Tensor
    segments_BK: tf.Tensor

    def forward(self) -> Sums:
        """Returns the sums over all keys."""

        def body(index: tf.Tensor, sums: Sums) -> tuple:
            logits_BNLK, _ = self._logits(index)
            values_BNKD = self._block(self.values_BNKD, index)
            sums = running_softmax.with_keys(sums, logits_BNLK, values_BNKD, "BNLK,BNKD->BNLD")
            return index + 1, sums

        start = (tf.constant(0), running_softmax.no_keys(self.query_BNLD, "BNLD"))
        return self._while(body, start)[1]

    def backward(self, d_BNLD: tf.Tensor, done: Done) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the gradients of queries, keys and values: weights are computed once more."""

        def body(
            index: tf.Tensor, d_query: tf.Tensor, d_keys: tf.TensorArray, d_values: tf.TensorArray
        ) -> tuple:
            keys_BNKD, values_BNKD = (
                self._block(x, index) for x in (self.keys_BNKD, self.values_BNKD)
            )
            logits_BNLK, capped_BNLK = self._logits(index)
            d_weights_BNLK = einsum("BNLD,BNKD->BNLK", d_BNLD, values_BNKD)
            weights_BNLK, d_logits_BNLK = running_softmax.gradients(
                done, logits_BNLK, capped_BNLK, d_weights_BNLK, self.blocks.cap
            )
            more = einsum("BNLK,BNKD->BNLD", d_logits_BNLK, keys_BNKD)
            d_query = annotate(d_query + tf.cast(more, tf.float32), "BNLD")
            new = einsum("BNLK,BNLD->BNKD", d_logits_BNLK, self.query_BNLD)
            d_keys = d_keys.write(index, new)
            new = einsum("BNLK,BNLD->BNKD", weights_BNLK, d_BNLD)
            return index + 1, d_query, d_keys, d_values.write(index, new)

        d_query = annotate(tf.zeros(self.query_BNLD.shape, tf.float32), "BNLD")
        start = (tf.constant(0), d_query, self._stack(), self._stack())
        _, d_query, d_keys, d_values = self._while(body, start)
        d_query = tf.cast(d_query, self.query_BNLD.dtype)
        return d_query, self._joined(d_keys), self._joined(d_values)

    def _logits(self, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """A block's float32 logits [B,N,L,K], and what they were before any bias."""
        keys_BNKD = self._block(self.keys_BNKD, index)
        products_BNLK = einsum("BNLD,BNKD->BNLK", self.query_BNLD, keys_BNKD)
        capped_BNLK = soft_cap(tf.cast(products_BNLK, tf.float32), self.blocks.cap)
        return capped_BNLK + self._bias(index), capped_BNLK

    def _bias(self, index: tf.Tensor) -> tf.Tensor:
        """`block_bias` [B,1,L,K]."""
        blocks = self.blocks
        start = [0, index * blocks.size]
        size = [self.segments_BK.shape[0], blocks.size]
        keys_B1K = tf.slice(self.segments_BK, start, size)[:, None, :]
        query_BL1 = self.segments_BL[:, :, None]
        query_L, first = tf.range(query_BL1.shape[1]), index * blocks.size
        distances_LK = first + tf.range(blocks.size)[None, :] - query_L[:, None]
        bias_BLK = block_bias(query_BL1, keys_B1K, distances_LK, blocks.is_causal, blocks.window)
        return bias_BLK[:, None]

    def _block(self, x_BNKD: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        batch, heads, _, head_dim = x_BNKD.shape
        size = self.blocks.size
        return annotate(
            tf.slice(x_BNKD, [0, 0, index * size, 0], [batch, heads, size, head_dim]), "BNKD"
        )

    def _stack(self) -> tf.TensorArray:
        batch, heads, _, head_dim = self.keys_BNKD.shape
        shape = [batch, heads, self.blocks.size, head_dim]
        return tf.TensorArray(self.keys_BNKD.dtype, self.blocks.count, element_shape=shape)

    def _joined(self, stack: tf.TensorArray) -> tf.Tensor:
        """The blocks [B,N,K,D] of a stack one behind the other."""
        blocks = tf.transpose(stack.stack(), (1, 2, 0, 3, 4))
        return annotate(tf.reshape(blocks, self.keys_BNKD.shape), "BNKD")

    def _while(self, body: Callable, start: tuple) -> tuple:
        count = self.blocks.count
        return tf.while_loop(lambda index, *_: index < count, body, start, maximum_iterations=count)
