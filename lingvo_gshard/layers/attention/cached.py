"""Attention of new tokens to keys and values in a cache, for inference.

A cache has slots. A row writes its new keys and values to consecutive slots, in place, and a bias
says which slots each new token sees. So the same code decodes one token, computes a whole prompt,
encodes a sentence, and searches with a beam whose hypotheses share the slots of a row.
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import dynamic_slice
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.heads import heads_first
from lingvo_gshard.layers.attention.mask import MASKED
from lingvo_gshard.layers.attention.soft_cap import soft_cap
from lingvo_gshard.sharding import einsum


@dataclasses.dataclass(frozen=True)
class CacheView:
    """Where new tokens stand, and which slots of a cache they see.

    Attributes:
      positions_BL: int32, the position of each new token in its own text.
      is_visible_BLK: bool, whether a new token sees a slot. A dimension of 1 stands for all rows.
      distances_LK: int32, position of a slot's token minus position of the new token, where it is
        visible. Windows and relative biases use it.
      first_slot: int32 scalar, the slot of the first new token; the others follow. None: there is
        no cache, and the slots are the new tokens themselves.
    """

    positions_BL: tf.Tensor
    is_visible_BLK: tf.Tensor
    distances_LK: tf.Tensor
    first_slot: tf.Tensor | None = None

    def bias(self, window: int = 0) -> tf.Tensor:
        """Returns the float32 bias [B,L,K] of the logits.

        Args:
          window: largest distance between a query and a key; 0 for no limit.
        """
        is_visible_BLK = self.is_visible_BLK
        if window:
            is_visible_BLK &= tf.abs(self.distances_LK) <= window
        return tf.where(is_visible_BLK, 0.0, MASKED)


def row_view(ids_BL: tf.Tensor, is_causal: bool) -> CacheView:
    """Returns the view of rows without a cache. Each row is one text, with id 0 in padding.

    Padding may stand before or after the text. Positions count the tokens of the text.

    Args:
      ids_BL: int32 ids of the tokens.
      is_causal: whether a token sees no later one.
    """
    length = ids_BL.shape[1]
    is_token_BL = tf.not_equal(ids_BL, 0)
    index_L = tf.range(length)
    first_B1 = tf.reduce_min(tf.where(is_token_BL, index_L, length), axis=1, keepdims=True)
    distances_LK = index_L[None, :] - index_L[:, None]
    is_visible_BLK = tf.broadcast_to(is_token_BL[:, None, :], [*ids_BL.shape, length])
    if is_causal:
        is_visible_BLK &= distances_LK <= 0
    return CacheView(tf.maximum(index_L - first_B1, 0), is_visible_BLK, distances_LK)


def write(cache: NestedMap, new: NestedMap, view: CacheView) -> NestedMap:
    """Returns the cache with new keys and values at the view's slots.

    Args:
      cache: `key` and `value`, both [B,N,K,D].
      new: `key` and `value` of the new tokens, both [B,N,L,D].
      view: the slots.
    """
    return NestedMap(
        {name: dynamic_slice.write(cache[name], new[name], view.first_slot, 2) for name in cache}
    )


def attend(
    query_BLND: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    bias_BLK: tf.Tensor,
    logit_cap: float = 0.0,
    relative_bias_NLK: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns softmax(q k + biases) v [B,L,N,D], and the weights [B,N,L,K] without a gradient.

    Queries whose head shares keys are computed as more queries, so that keys are read once.

    Args:
      query_BLND: queries, already scaled by 1 / sqrt(D).
      keys_BNKD: keys; N may be smaller than that of the queries.
      values_BNKD: values, like the keys.
      bias_BLK: float32 bias of each new token and slot.
      logit_cap: c of c tanh(q k / c), applied before any bias; 0 disables it.
      relative_bias_NLK: a learned bias for each head of the queries.
    """
    batch, length, heads, dim = query_BLND.shape.as_list()
    shared, slots = keys_BNKD.shape[1], keys_BNKD.shape[2]
    times = heads // shared
    query_BNLD = heads_first(query_BLND, "BNLD")
    if times > 1:
        query_BNLD = tf.reshape(query_BNLD, [batch, shared, times * length, dim])
    logits_BNLK = tf.cast(einsum("BNLD,BNKD->BNLK", query_BNLD, keys_BNKD), tf.float32)
    logits_BNLK = soft_cap(logits_BNLK, logit_cap)
    bias_BNLK = bias_BLK[:, None]
    if relative_bias_NLK is not None:
        bias_BNLK += relative_bias_NLK[None]
    if times > 1:
        shape = [bias_BNLK.shape[0], heads, length, slots]
        bias_BNLK = tf.broadcast_to(bias_BNLK, shape)
        bias_BNLK = tf.reshape(bias_BNLK, [shape[0], shared, times * length, slots])
    logits_BNLK += bias_BNLK
    weights_BNLK = tf.exp(logits_BNLK - tf.reduce_max(logits_BNLK, -1, keepdims=True))
    sum_BNL1 = tf.reduce_sum(weights_BNLK, -1, keepdims=True)
    typed_BNLK = tf.cast(weights_BNLK, values_BNKD.dtype)
    mixed_BNLD = einsum("BNLK,BNKD->BNLD", typed_BNLK, values_BNKD)
    mixed_BNLD /= tf.cast(sum_BNL1, mixed_BNLD.dtype)
    mixed_BNLD = tf.reshape(mixed_BNLD, [batch, heads, length, dim])
    weights_BNLK = tf.reshape(weights_BNLK / sum_BNL1, [batch, heads, length, slots])
    return heads_first(mixed_BNLD, "BLND"), weights_BNLK
