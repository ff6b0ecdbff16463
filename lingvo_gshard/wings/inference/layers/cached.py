"""Attention of new tokens to keys and values in a cache, for inference.

A cache has slots. A row writes its new keys and values to consecutive slots, in place, and a bias
says which slots each new token sees. One code therefore decodes a token, computes a whole prompt,
encodes a sentence, and searches with a beam. The hypotheses of a beam share the slots of a row.
Programs for TPUs and GPUs use a kernel of the hardware where there is one (cached_fused.py).

Keys and values are lists of blocks of slots, each an array of its own (docs/architecture.md): XLA
would first copy a slice of one array. The blocks of a single row may lack its dimension
(`without_row`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from lingvo_gshard.core import Layer, NestedMap, UserError, shapes, tf
from lingvo_gshard.layers import (
    MASKED,
    PLAIN,
    AttentionMask,
    Reach,
    RelativeBias,
    SoftmaxOptions,
    heads_first,
    rotary,
    soft_cap,
)
from lingvo_gshard.sharding import annotate, axes_of, einsum

_MOST_BLOCKS = 4
# Rows are divided into fewer blocks rather than into blocks of fewer positions than this.
_LEAST_BLOCK = 32
# The reach of an attention without limits.
EVERYTHING = Reach()
# To read fewer slots than these in all rows takes less time than a branch.
_LEAST_SLOTS = 1024


@dataclasses.dataclass(frozen=True)
class Ring:
    """The slots that one new token of each row sees, as a kernel of the hardware takes them.

    Attributes:
      newest: int32 scalar, the slot of the new tokens.
      reach_B: int32, how many slots before the newest each row sees; -1 for none.
      window: the largest distance between a token and a slot; 0 for no limit.
    """

    newest: tf.Tensor
    reach_B: tf.Tensor
    window: int


@dataclasses.dataclass(frozen=True)
class Visible:
    """The slots of a cache, or the positions of a memory, that new tokens see.

    Attributes:
      bias_BLK: float32 bias of the logits: 0 where a new token, or all new tokens of a row, see a
        slot, and a large negative number elsewhere.
      used: int32 scalar, a number of first slots that hold all visible ones; None for all.
      learned_bias: a learned bias that the layers of a stack share, with its `bias_NLK`; None for
        none.
      ring: the same slots for a kernel of the hardware; None if they are no part of a ring.
      mask: the same positions as a mask, if the slots are the new tokens themselves; else None.
    """

    bias_BLK: tf.Tensor
    used: tf.Tensor | None = None
    learned_bias: RelativeBias | None = None
    ring: Ring | None = None
    mask: AttentionMask | None = None


@dataclasses.dataclass(frozen=True)
class CacheView:
    """Positions of new tokens, and the slots of a cache that they see.

    Attributes:
      positions_BL: int32, the position of each new token in its own text.
      is_visible_BLK: bool, whether a new token sees a slot. A dimension of 1 stands for all rows.
      distances_LK: int32, position of a slot's token minus position of the new token, where it is
        visible. Windows and relative biases use it.
      first_slot: int32 scalar, the slot of the first new token; the others follow. None: there is
        no cache, and the slots are the new tokens themselves.
      past_B: int32, less than K: how many slots before its own the only new token of each row sees.
        None if several tokens of a row are new, or if a token sees other slots.
      mask: what the new tokens see without a cache; None with a cache.
    """

    positions_BL: tf.Tensor
    is_visible_BLK: tf.Tensor
    distances_LK: tf.Tensor
    first_slot: tf.Tensor | None = None
    past_B: tf.Tensor | None = None
    mask: AttentionMask | None = None

    def visible(
        self,
        mask_BL: tf.Tensor,
        reach: Reach = EVERYTHING,
        learned_bias: RelativeBias | None = None,
    ) -> Visible:
        """Returns the slots that attentions with one reach see."""
        is_visible_BLK = self.is_visible_BLK
        if reach.window:
            is_visible_BLK &= tf.abs(self.distances_LK) <= reach.window
        if reach.chunk:
            in_chunk_BL = tf.math.floormod(self.positions_BL, reach.chunk)
            is_visible_BLK &= -self.distances_LK <= in_chunk_BL[..., None]
        bias_BLK = tf.where(is_visible_BLK, 0.0, MASKED)
        # Slots that are the new tokens themselves are not in blocks: all of them are read.
        used = None if self.first_slot is None else used_slots(bias_BLK, mask_BL)
        mask = self.mask and dataclasses.replace(self.mask, window=reach.window)
        if mask is not None and reach.chunk:
            assert mask.segments_BL is not None
            chunks_BL = chunks_of(mask.segments_BL, reach.chunk)
            mask = dataclasses.replace(mask, segments_BL=chunks_BL, chunk=reach.chunk)
        return Visible(bias_BLK, used, learned_bias, self._ring(mask_BL, reach), mask)

    def _ring(self, mask_BL: tf.Tensor, reach: Reach) -> Ring | None:
        """Returns the slots that `visible` describes, for a kernel."""
        if self.first_slot is None or self.past_B is None:
            return None
        reach_B = self.past_B
        if reach.window:
            reach_B = tf.minimum(reach_B, reach.window)
        if reach.chunk:
            in_chunk_B = tf.math.floormod(self.positions_BL[:, 0], reach.chunk)
            reach_B = tf.minimum(reach_B, in_chunk_B)
        reach_B = tf.where(tf.equal(mask_BL[:, 0], 0), -1, reach_B)
        return Ring(self.first_slot, reach_B, reach.window)


def chunks_of(segments_BL: tf.Tensor, chunk: int) -> tf.Tensor:
    """Returns int32 segments [B,L] that are the chunks of texts, 0 in padding.

    Args:
      segments_BL: int32 segments, each a text; the tokens of a segment are contiguous.
      chunk: positions of a chunk. The last one of a text may have fewer.
    """
    most = -(-shapes.known_sizes(segments_BL.shape)[1] // chunk)
    chunks_BL = segments_BL * most + rotary.positions_in_segments(segments_BL) // chunk
    return annotate(tf.where(tf.equal(segments_BL, 0), 0, chunks_BL), "BL")


def row_view(is_token_BL: tf.Tensor, is_causal: bool) -> CacheView:
    """Returns the view of rows without a cache. Each row is one text.

    Padding may stand before or after the text. Positions count the tokens of the text.
    """
    length = is_token_BL.shape[1]
    index_L = tf.range(length)
    first_B1 = tf.reduce_min(tf.where(is_token_BL, index_L, length), axis=1, keepdims=True)
    distances_LK = index_L[None, :] - index_L[:, None]
    is_visible_BLK = tf.broadcast_to(is_token_BL[:, None, :], [*is_token_BL.shape, length])
    if is_causal:
        is_visible_BLK &= distances_LK <= 0
    # Padding sees other padding, whose output nobody reads.
    mask = AttentionMask(tf.cast(is_token_BL, tf.int32), is_causal=is_causal)
    positions_BL = tf.maximum(index_L - first_B1, 0)
    return CacheView(positions_BL, is_visible_BLK, distances_LK, mask=mask)


def used_slots(bias_BLK: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor | None:
    """Returns an int32 scalar: the number of first slots that hold all visible ones.

    Devices that each have some of the rows would have to agree on it: then None, for all slots.
    """
    if axes_of("B")[0]:
        return None
    is_visible_BLK = (bias_BLK > MASKED / 2) & tf.not_equal(mask_BL, 0)[..., None]
    end_K = tf.range(1, bias_BLK.shape[-1] + 1)
    return tf.reduce_max(tf.where(is_visible_BLK, end_K, 0))


def block_count(rows: int, positions: int, width: int = 1) -> int:
    """Returns into how many blocks the slots of each row are divided, `width` for a position."""
    if rows * positions * width < _LEAST_SLOTS:
        return 1
    return next(
        count
        for count in (_MOST_BLOCKS, _MOST_BLOCKS // 2, 1)
        if count == 1 or (positions % count == 0 and positions // count >= _LEAST_BLOCK)
    )


def check_one_text(layer: Layer, hypotheses: int) -> None:
    """Checks that a layer whose cache has arrays without slots decodes no beam.

    Raises:
      UserError: there are several hypotheses of a text.
    """
    if hypotheses > 1:
        raise UserError(
            f"{layer.path}: a state belongs to one text, and {hypotheses} hypotheses of a beam "
            "would share it; beam_size=1 was expected"
        )


def without_row(caches: Sequence[NestedMap]) -> list[NestedMap]:
    """Returns the caches of one row with blocks [N,K,D].

    XLA for CPU drops dimensions of size 1 from products. A block with such a dimension would be
    written twice, in both shapes, and copied for each.
    """
    return [cache.transform(lambda block_1NKD: tf.squeeze(block_1NKD, 0)) for cache in caches]


def with_row(caches: Sequence[NestedMap]) -> list[NestedMap]:
    """Returns the caches of one row with blocks [B,N,K,D], B = 1."""
    return [cache.transform(lambda block_NKD: block_NKD[None]) for cache in caches]


def in_blocks(x_BNKD: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Returns keys or values divided into `count` blocks with equally many slots."""
    return tf.split(x_BNKD, count, axis=2)


def write(cache: NestedMap, new: NestedMap, view: CacheView) -> NestedMap:
    """Returns the cache, blocks [B,N,K,D], with new keys and values [B,N,L,D] in one of them."""
    return NestedMap(
        {name: _write_blocks(cache[name], new[name], view.first_slot) for name in cache}
    )


def _write_blocks(
    blocks_BNKD: Sequence[tf.Tensor], new_BNLD: tf.Tensor, first_slot: tf.Tensor
) -> list[tf.Tensor]:
    # [N,L,D] for a row without its dimension.
    new_BNLD = tf.reshape(new_BNLD, new_BNLD.shape[-blocks_BNKD[0].shape.rank :])
    dimension, length = new_BNLD.shape.rank - 2, new_BNLD.shape[-2]
    if len(blocks_BNKD) == 1:
        return [shapes.write_slice(blocks_BNKD[0], new_BNLD, first_slot, dimension)]
    written, before = [], 0
    for block_BNKD in blocks_BNKD:
        size = block_BNKD.shape[-2]
        offset = first_slot - before
        is_here = (offset >= 0) & (offset < size)
        # The other blocks write what they have: a branch would cost more.
        offset = tf.clip_by_value(offset, 0, size - length)
        old_BNLD = shapes.read_slice(block_BNKD, offset, length, dimension)
        part_BNLD = tf.where(is_here, new_BNLD, old_BNLD)
        written.append(shapes.write_slice(block_BNKD, part_BNLD, offset, dimension))
        before += size
    return written


def attend(
    query_BLND: tf.Tensor, slots: NestedMap, visible: Visible, softmax: SoftmaxOptions = PLAIN
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns softmax(q k + biases) v [B,L,N,D], and the weights [B,N,L,K] without a gradient.

    Heads of queries that share keys are computed as more queries of one head. Keys are then read
    once.

    Args:
      query_BLND: queries, already scaled.
      slots: `key` and `value`, both lists of blocks [B,N,K,D]; there may be fewer heads N than
        queries have, and values may have a D of their own.
      visible: the slots that each new token sees.
      softmax: the options of the softmax, without dropout. A relative bias has its `bias_NLK`.
    """
    relative_bias, used = softmax.relative_bias, visible.used
    ends = list(itertools.accumulate(block.shape[-2] for block in slots.key))

    def attend_to(count: int) -> tuple[tf.Tensor, tf.Tensor]:
        size = ends[count - 1]
        bias = relative_bias and relative_bias.of_first_keys(size)
        first = NestedMap(key=slots.key[:count], value=slots.value[:count])
        options = dataclasses.replace(softmax, relative_bias=bias)
        bias_BLK = visible.bias_BLK[..., :size]
        mixed_BLND, weights_BNLK = _attend(query_BLND, first, bias_BLK, options)
        return mixed_BLND, tf.pad(weights_BNLK, [[0, 0], [0, 0], [0, 0], [0, ends[-1] - size]])

    if used is None or len(ends) == 1:
        return attend_to(len(ends))
    more = tf.reduce_sum(tf.cast(used > tf.constant(ends[:-1]), tf.int32))
    return tf.switch_case(
        more, [functools.partial(attend_to, count) for count in range(1, len(ends) + 1)]
    )


def _attend(
    query_BLND: tf.Tensor, slots: NestedMap, bias_BLK: tf.Tensor, softmax: SoftmaxOptions
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the same as `attend`, for all of these slots."""
    batch, length, heads, dim = query_BLND.shape.as_list()
    value_dim = slots.value[0].shape[-1]
    sizes = [block.shape[-2] for block in slots.key]
    shared, count = slots.key[0].shape[-3], sum(sizes)
    times = heads // shared
    query_BNLD = heads_first(query_BLND, "BNLD")
    rows = [batch] if slots.key[0].shape.rank == 4 else []
    query_BNLD = tf.reshape(query_BNLD, [*rows, shared, times * length, dim])
    equation = "BNLD,BNKD->BNLK" if rows else "NLD,NKD->NLK"
    logits_BNLK = _joined([einsum(equation, query_BNLD, block_BNKD) for block_BNKD in slots.key])
    logits_BNLK = tf.reshape(logits_BNLK, [batch, shared, times * length, count])
    logits_BNLK = soft_cap(tf.cast(logits_BNLK, tf.float32), softmax.cap)
    bias_BNLK = bias_BLK[:, None]
    if softmax.relative_bias is not None:
        relative_NLK = softmax.relative_bias.bias_NLK
        assert relative_NLK is not None
        bias_BNLK += relative_NLK[None]
    if times > 1:
        shape = [bias_BNLK.shape[0], heads, length, count]
        bias_BNLK = tf.broadcast_to(bias_BNLK, shape)
        bias_BNLK = tf.reshape(bias_BNLK, [shape[0], shared, times * length, count])
    logits_BNLK += bias_BNLK
    largest_BNL1 = tf.reduce_max(logits_BNLK, -1, keepdims=True)
    if softmax.sinks_N is not None:
        sinks_1NL1 = tf.reshape(tf.repeat(softmax.sinks_N, length), [1, shared, times * length, 1])
        largest_BNL1 = tf.maximum(largest_BNL1, sinks_1NL1)
    weights_BNLK = tf.exp(logits_BNLK - largest_BNL1)
    sum_BNL1 = tf.reduce_sum(weights_BNLK, -1, keepdims=True)
    if softmax.sinks_N is not None:
        sum_BNL1 += tf.exp(sinks_1NL1 - largest_BNL1)
    mixed_BNLD = _weighted_sum(weights_BNLK, slots.value, sizes) / sum_BNL1
    mixed_BNLD = tf.cast(mixed_BNLD, query_BLND.dtype)
    mixed_BNLD = tf.reshape(mixed_BNLD, [batch, heads, length, value_dim])
    weights_BNLK = tf.reshape(weights_BNLK / sum_BNL1, [batch, heads, length, count])
    return heads_first(mixed_BNLD, "BLND"), weights_BNLK


def _joined(blocks: Sequence[tf.Tensor]) -> tf.Tensor:
    return blocks[0] if len(blocks) == 1 else tf.concat(blocks, -1)


def _weighted_sum(
    weights_BNLK: tf.Tensor, blocks_BNKD: Sequence[tf.Tensor], sizes: Sequence[int]
) -> tf.Tensor:
    """Returns the float32 sum [B,N,L,D] of the values with their weights."""
    equation, shape = "BNLK,BNKD->BNLD", weights_BNLK.shape
    weights_BNLK = tf.cast(weights_BNLK, blocks_BNKD[0].dtype)
    if blocks_BNKD[0].shape.rank == 3:
        equation, weights_BNLK = "NLK,NKD->NLD", tf.squeeze(weights_BNLK, 0)
    pairs = zip(tf.split(weights_BNLK, sizes, -1), blocks_BNKD, strict=True)
    parts = [einsum(equation, part_BNLK, block_BNKD) for part_BNLK, block_BNKD in pairs]
    sum_BNLD = tf.add_n([tf.cast(part_BNLD, tf.float32) for part_BNLD in parts])
    return tf.reshape(sum_BNLD, [*shape[:-1], blocks_BNKD[0].shape[-1]])
