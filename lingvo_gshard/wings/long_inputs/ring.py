"""RingKernel: queries stay on their devices while keys and values rotate around the devices.

Liu et al. 2023, arXiv 2310.01889, section 3.

Rows are cut into parts. In this file L is the part, s the position of a query in its part, and K
the position of a key in its part:

    queries            [B,N,L,s,D], with segments [B,L,s]
    keys and values    [B,N,L,K,D], with segments [B,L,K]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lingvo_gshard.core import Params, UserError, custom_gradient, known_sizes, tf
from lingvo_gshard.layers import (
    BLOCK_PADDING,
    PLAIN,
    AttentionKernel,
    AttentionMask,
    DropoutMask,
    SoftmaxOptions,
    soft_cap,
)
from lingvo_gshard.sharding import annotate, collectives, einsum, parts_of
from lingvo_gshard.wings.kernels.layers.fused_attention import attend_fused
from lingvo_gshard.wings.long_inputs import blockwise
from lingvo_gshard.wings.long_inputs.blockwise import RunningSums, SoftmaxStatistics

LOCAL_LETTERS = {"s": "positions of queries within a part of a row"}

# Queries, keys and values have the parts as this dimension.
PARTS = 2


class KeyBlock(NamedTuple):
    """The keys and values of every part in one step of the ring.

    Attributes:
      keys: [B,N,L,K,D].
      values: [B,N,L,K,D].
      segments: int32 [B,L,K].
    """

    keys: tf.Tensor
    values: tf.Tensor
    segments: tf.Tensor


@dataclasses.dataclass(frozen=True)
class RingPass:
    """One call of ring attention. In step t, part l attends to the keys of part l - t.

    Attributes:
      dropout: which weights are dropped; None for none.
      block_size: keys of a part that are attended to at a time; 0 means all of them.
      query: scaled queries [B,N,L,s,D].
      segments: int32 segments [B,L,s] of the queries.
      keys_per_part: keys of a part, without padding.
    """

    mask: AttentionMask
    cap: float
    dropout: DropoutMask | None
    block_size: int
    query: tf.Tensor
    segments: tf.Tensor
    keys_per_part: int

    @property
    def parts(self) -> int:
        """Number of parts."""
        return known_sizes(self.query.shape)[PARTS]

    def padded_block(self, keys: tf.Tensor, values: tf.Tensor, segments: tf.Tensor) -> KeyBlock:
        """Returns all keys, each part padded to a multiple of the block size."""
        missing = -keys.shape[3] % (self.block_size or keys.shape[3])
        padding = [[0, 0], [0, 0], [0, missing]]
        keys, values = (tf.pad(x, [[0, 0], *padding, [0, 0]]) for x in (keys, values))
        segments = tf.pad(segments, padding, constant_values=BLOCK_PADDING)
        return KeyBlock(
            self._annotate_keys(keys),
            self._annotate_keys(values),
            annotate_segments(segments, "BLK"),
        )

    def forward(self, block: KeyBlock, sinks_N: tf.Tensor | None = None) -> RunningSums:
        """Returns the softmax sums over all keys, and the sinks."""

        def step(index: tf.Tensor, block: KeyBlock, sums: RunningSums) -> tuple:
            next_block = KeyBlock(*self._rotate(block))
            return index + 1, next_block, self._attend(index, block, sums)

        value_dim = block.values.shape[-1]
        sums = blockwise.empty_sums(self.query, value_dim, "BNLsD", sinks_N)
        start = (tf.constant(0), block, sums)
        return self._attend(*self._loop(step, start))

    def backward(
        self, block: KeyBlock, d_mixed: tf.Tensor, statistics: SoftmaxStatistics
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the float32 gradients of queries, keys and values.

        The gradients of keys and values rotate with them. A last rotation brings them back to the
        devices of their keys.
        """

        def step(index: tf.Tensor, block: KeyBlock, gradients: tuple) -> tuple:
            next_block = KeyBlock(*self._rotate(block))
            d_query, *d_keys_values = self._add_gradients(
                index, block, gradients, d_mixed, statistics
            )
            return index + 1, next_block, (d_query, *self._rotate(d_keys_values))

        zeros = [tf.zeros(x.shape, tf.float32) for x in (self.query, block.keys, block.values)]
        zeros = (annotate(zeros[0], "BNLsD"), *map(self._annotate_keys, zeros[1:]))
        last = self._loop(step, (tf.constant(0), block, zeros))
        index, block, sums = last
        d_query, *d_keys_values = self._add_gradients(index, block, sums, d_mixed, statistics)
        d_keys, d_values = self._rotate(d_keys_values)
        return d_query, d_keys, d_values

    def _loop(self, step: Callable, start: tuple) -> tuple:
        """Runs all steps except the last one, which does not pass keys on."""
        count = self.parts - 1
        if not count:
            return start
        return tf.while_loop(lambda index, *_: index < count, step, start, maximum_iterations=count)

    def _attend(self, index: tf.Tensor, block: KeyBlock, sums: RunningSums) -> RunningSums:
        """Returns the sums with the keys of step `index` added."""

        def add_block(first: int | tf.Tensor, sums: RunningSums) -> RunningSums:
            keys, values, segments = self._slice(block, first)
            logits, _ = self._logits(index, first, keys, segments)
            dropout = self._dropout(index, first, keys)
            return blockwise.add_keys(sums, logits, values, "BNLsK,BNLKD->BNLsD", dropout)

        size = self._size(block)
        if size == block.keys.shape[3]:
            return add_block(0, sums)
        count = block.keys.shape[3] // size
        _, sums = tf.while_loop(
            lambda i, _: i < count,
            lambda i, sums: (i + 1, add_block(i * size, sums)),
            (tf.constant(0), sums),
            maximum_iterations=count,
        )
        return sums

    def _add_gradients(
        self,
        index: tf.Tensor,
        block: KeyBlock,
        gradients: tuple,
        d_mixed: tf.Tensor,
        statistics: SoftmaxStatistics,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the gradients with the contribution of step `index` added."""
        d_query, d_keys, d_values = gradients
        size = self._size(block)
        count = block.keys.shape[3] // size
        if count == 1:
            d_query, new_d_keys, new_d_values = self._block_gradients(
                index, 0, block, d_query, d_mixed, statistics
            )
            return (
                d_query,
                self._annotate_keys(d_keys + new_d_keys),
                self._annotate_keys(d_values + new_d_values),
            )

        def body(i: tf.Tensor, d_query: tf.Tensor, *stacks: tf.TensorArray) -> tuple:
            d_query, *new = self._block_gradients(
                index, i * size, block, d_query, d_mixed, statistics
            )
            written = (stack.write(i, d) for stack, d in zip(stacks, new, strict=True))
            return i + 1, d_query, *written

        shapes = ([*d.shape[:3], size, d.shape[4]] for d in (d_keys, d_values))
        stacks = (tf.TensorArray(tf.float32, count, element_shape=shape) for shape in shapes)
        start = (tf.constant(0), d_query, *stacks)
        _, d_query, *stacks = tf.while_loop(
            lambda i, *_: i < count, body, start, maximum_iterations=count
        )
        new = [tf.transpose(stack.stack(), (1, 2, 3, 0, 4, 5)) for stack in stacks]
        new_d_keys, new_d_values = (
            tf.reshape(x, d.shape) for x, d in zip(new, (d_keys, d_values), strict=True)
        )
        return (
            d_query,
            self._annotate_keys(d_keys + new_d_keys),
            self._annotate_keys(d_values + new_d_values),
        )

    def _block_gradients(
        self,
        index: tf.Tensor,
        first: int | tf.Tensor,
        block: KeyBlock,
        d_query: tf.Tensor,
        d_mixed: tf.Tensor,
        statistics: SoftmaxStatistics,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns d_query with the keys from `first` added, and the gradients of these keys."""
        keys, values, segments = self._slice(block, first)
        logits, capped = self._logits(index, first, keys, segments)
        d_weights = einsum("BNLsD,BNLKD->BNLsK", d_mixed, values)
        dropout = self._dropout(index, first, keys)
        weights, d_logits = blockwise.gradients(
            statistics, logits, capped, d_weights, self.cap, dropout
        )
        new_d_query = einsum("BNLsK,BNLKD->BNLsD", d_logits, keys)
        d_query = annotate(d_query + tf.cast(new_d_query, tf.float32), "BNLsD")
        d_keys = einsum("BNLsK,BNLsD->BNLKD", d_logits, self.query)
        d_values = einsum("BNLsK,BNLsD->BNLKD", weights, d_mixed)
        heads = block.keys.shape[1]
        return d_query, _sum_heads(d_keys, heads), _sum_heads(d_values, heads)

    def _size(self, block: KeyBlock) -> int:
        """Returns the number of keys attended to at a time."""
        keys = block.keys.shape[3]
        return min(self.block_size or keys, keys)

    def _slice(self, block: KeyBlock, first: int | tf.Tensor) -> KeyBlock:
        """Returns the keys from `first` on, with as many heads as the queries."""
        keys, values, segments = block
        size = self._size(block)
        if size < keys.shape[3]:
            start = [0, 0, 0, first, 0]
            keys, values = (
                self._annotate_keys(tf.slice(x, start, [*x.shape[:3], size, x.shape[4]]))
                for x in (keys, values)
            )
            segments = tf.slice(segments, [0, 0, first], [*segments.shape[:2], size])
        times = self.query.shape[1] // keys.shape[1]
        return KeyBlock(_repeat_heads(keys, times), _repeat_heads(values, times), segments)

    def _logits(
        self, index: tf.Tensor, first: int | tf.Tensor, keys: tf.Tensor, segments: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns float32 logits [B,N,L,s,K], with and without the bias of the mask."""
        products = einsum("BNLsD,BNLKD->BNLsK", self.query, keys)
        capped = soft_cap(tf.cast(products, tf.float32), self.cap)
        return capped + self._bias(index, first, segments), capped

    def _bias(self, index: tf.Tensor, first: int | tf.Tensor, segments: tf.Tensor) -> tf.Tensor:
        """Returns the bias [B,1,L,s,K] of the keys from `first` on in step `index`."""
        query_L, key_L = self._positions(index, first, segments.shape[2])
        distances = annotate(key_L - query_L, "LsK", reserved="BN")
        bias = self.mask.block_bias(self.segments[..., None], segments[:, :, None, :], distances)
        return annotate_segments(bias, "BLsK")[:, None]

    def _positions(
        self, index: tf.Tensor, first: int | tf.Tensor, count: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the positions [L,s,1] of queries, and [L,1,K] of `count` keys from `first` on."""
        # Each device counts its own parts. Otherwise all would hold the positions of every part.
        part_L = annotate(tf.range(self.parts), "L", reserved="BN")[:, None, None]
        owner_L = tf.math.floormod(part_L - index, self.parts)
        query_L = part_L * self.segments.shape[2] + tf.range(self.segments.shape[2])[:, None]
        return query_L, owner_L * self.keys_per_part + first + tf.range(count)

    def _dropout(
        self, index: tf.Tensor, first: int | tf.Tensor, keys: tf.Tensor
    ) -> tf.Tensor | float:
        """Returns the factors [B,N,L,s,K] of the weights of keys from `first` on."""
        if self.dropout is None:
            return 1.0
        batch, heads, parts, length, _ = known_sizes(self.query.shape)
        shape = [batch, heads, parts * length, parts * self.keys_per_part]
        rows_B, heads_N, queries, _ = self.dropout.index_terms(shape)
        _, key_L = self._positions(index, first, known_sizes(keys.shape)[3])
        terms = tf.reshape(queries, [parts, length, 1]) + tf.cast(key_L, tf.uint32)
        terms = annotate(terms, "LsK", reserved="BN") + heads_N[:, None, None, None]
        terms = annotate(rows_B[:, None, None, None, None] + terms, "BNLsK")
        return self.dropout.factors_at(terms, self.query.dtype)

    def _rotate(self, tensors: Iterable[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Passes the keys of every part to the next part."""
        if self.parts == 1:
            return tuple(tensors)
        return tuple(self._rotate_one(x) for x in tensors)

    def _rotate_one(self, x: tf.Tensor) -> tf.Tensor:
        if x.shape.rank == 3:
            return annotate_segments(collectives.rotated(x, 1), "BLK")
        return self._annotate_keys(collectives.rotated(x, PARTS))

    def _annotate_keys(self, x: tf.Tensor) -> tf.Tensor:
        """Annotates keys. Heads stay unsplit if they do not divide over the devices."""
        return annotate(x, "BNLKD", unsplit="N" if x.shape[1] % parts_of("BNLD")[1] else "")


def annotate_segments(x: tf.Tensor, layout: str) -> tf.Tensor:
    """Annotates a tensor without heads like the tensors with heads that it is combined with."""
    return annotate(x, layout, reserved="N")


def _repeat_heads(x: tf.Tensor, times: int) -> tf.Tensor:
    """Repeats each head `times` times in a row."""
    if times == 1:
        return x
    batch, heads, *rest = x.shape.as_list()
    repeated = tf.broadcast_to(x[:, :, None], [batch, heads, times, *rest])
    return annotate(tf.reshape(repeated, [batch, heads * times, *rest]), "BNLKD")


def _sum_heads(x: tf.Tensor, heads: int) -> tf.Tensor:
    """Returns the float32 gradient of `_repeat_heads`."""
    x = tf.cast(x, tf.float32)
    batch, repeated, *rest = x.shape.as_list()
    if repeated == heads:
        return x
    return tf.reduce_sum(tf.reshape(x, [batch, heads, repeated // heads, *rest]), 2)


class RingKernel(AttentionKernel):
    """Attends to one part of the keys at a time while devices pass the parts around a ring.

    Rows are cut into as many parts as the current partitioning splits L into. Without a
    partitioning, or if it does not split L, there is one part, and nothing rotates.

    Programs for TPUs and GPUs attend to each part by the platform's fused kernel; see
    fused_ring.py. Elsewhere there is no manual region. The parts are a dimension that is sharded
    over the mesh, so that the partitioner generates local products and one collective-permute per
    step.
    """

    keys_layout = "BNLD"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "block_size", 0, "Keys of a part that are attended to at a time; 0: all.", minimum=0
        )
        p.define("use_fused", True, "Whether programs use the platform's fused kernel.")
        p.define(
            "is_balanced",
            True,
            "Whether each device computes an early and a late part of a causal row, so that all "
            "compute as much. Only the platform's kernel skips what positions hide, and profits. "
            "Half of all queries, keys, values and outputs are sent to other devices for this.",
        )
        return p

    def attend(
        self,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        softmax: SoftmaxOptions = PLAIN,
    ) -> tf.Tensor:
        """Returns the attention output [B,N,L,D], as the base class describes.

        Raises:
          UserError: L or K does not divide into equal parts.
        """
        parts = self._parts(query_BNLD, keys_BNKD)
        if self.p.use_fused:
            arrays = query_BNLD, keys_BNKD, values_BNKD
            fused_BNLD = attend_fused(*arrays, mask, softmax, self.p.is_balanced)
            if fused_BNLD is not None:
                return fused_BNLD

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
            dropout, sinks = blockwise.split_dropout(softmax, others)
            query = annotate(_split(query_BNLD, parts, PARTS), "BNLsD")
            segments = annotate_segments(_split(segments_BL, parts, 1), "BLs")
            keys_per_part = keys_BNKD.shape[2] // parts
            options = mask, softmax.cap, dropout, self.p.block_size
            ring = RingPass(*options, query, segments, keys_per_part)
            keys, values = (_split(x, parts, PARTS) for x in (keys_BNKD, values_BNKD))
            block = ring.padded_block(keys, values, _split(key_segments_BK, parts, 1))
            sums = ring.forward(block, *sinks)
            mixed = sums.result(query.dtype)

            def gradient(d_BNLD: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
                d_mixed = annotate(_split(d_BNLD, parts, PARTS), "BNLsD")
                statistics = sums.statistics(d_mixed, mixed)
                gradients = ring.backward(block, d_mixed, statistics)
                d_query, d_keys, d_values = (tf.cast(x, query.dtype) for x in gradients)
                return (
                    annotate(_join(d_query, query_BNLD.shape), "BNLD"),
                    _join(d_keys, keys_BNKD.shape),
                    _join(d_values, values_BNKD.shape),
                    *[None] * (2 + len(others) - len(sinks)),
                    *(blockwise.sink_gradients(statistics, x_N) for x_N in sinks),
                )

            return annotate(_join(mixed, query_BNLD.shape), "BNLD"), gradient

        segments = mask.explicit_segments(query_BNLD, keys_BNKD)
        others = blockwise.dropout_and_sinks(softmax)
        return compute(query_BNLD, keys_BNKD, values_BNKD, *segments, *others)

    def _parts(self, query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor) -> int:
        """Returns the number of parts of a row; ValueError if they are not equal."""
        parts = parts_of("BNLD")[PARTS]
        for letter, length in (("L", query_BNLD.shape[2]), ("K", keys_BNKD.shape[2])):
            if length % parts:
                raise UserError(
                    f"{self.path}: a ring of {parts} devices needs equal parts of rows, and "
                    f"{letter} is {length}; a multiple of {parts} was expected"
                )
        return parts


def _split(x: tf.Tensor, parts: int, dimension: int) -> tf.Tensor:
    """Splits one dimension into parts and positions within a part."""
    shape = x.shape.as_list()
    split = [parts, shape[dimension] // parts]
    return tf.reshape(x, [*shape[:dimension], *split, *shape[dimension + 1 :]])


def _join(x: tf.Tensor, shape_BNLD: tf.TensorShape) -> tf.Tensor:
    """Reverses `_split` of dimension PARTS, and drops the padding of blocks."""
    batch, heads, length, _ = shape_BNLD.as_list()
    parts = x.shape[PARTS]
    return tf.reshape(x[:, :, :, : length // parts], [batch, heads, length, x.shape[-1]])
