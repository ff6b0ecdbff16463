"""Attention of all heads to the same keys. Near keys are computed in blocks of a row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.layers import BLOCK_PADDING, AttentionMask, SoftmaxOptions, soft_cap
from lingvo_gshard.sharding import annotate

LOCAL_LETTERS = {"c": "blocks of a row", "i": "positions of a block", "k": "keys of a block"}


@dataclasses.dataclass(frozen=True)
class KeyBlocks:
    """Keys that all heads share, and that are also the values.

    Attributes:
      keys_BckD: the keys of each block of positions. A row may be a single block.
      bias_Bcik: float32 bias of the logits.
    """

    keys_BckD: tf.Tensor
    bias_Bcik: tf.Tensor

    @classmethod
    def of_row(cls, keys_BKD: tf.Tensor, bias_BLK: tf.Tensor) -> KeyBlocks:
        """Returns keys that all positions of a row may see."""
        return cls(keys_BKD[:, None], annotate(bias_BLK, "BLK", reserved="N")[:, None])

    @classmethod
    def near(cls, key_BLD: tf.Tensor, segments_BL: tf.Tensor, mask: AttentionMask) -> KeyBlocks:
        """Returns the keys of a causal mask with a window: of a block, and of the one before.

        Blocks are longer than the window, and divide the row.
        """
        batch, length, dim = known_sizes(key_BLD.shape)
        least = min(mask.window + 1, length)
        size = next(n for n in range(least, length + 1) if length % n == 0)
        key_BciD = tf.reshape(key_BLD, [batch, -1, size, dim])
        segments_Bci = tf.reshape(segments_BL, [batch, -1, size])
        keys_BckD = _with_block_before(key_BciD, 0)
        segments_Bck = _with_block_before(segments_Bci, BLOCK_PADDING)
        distances_ik = tf.range(-size, size) - tf.range(size)[:, None]
        bias_Bcik = mask.block_bias(segments_Bci[..., None], segments_Bck[:, :, None], distances_ik)
        return cls(keys_BckD, bias_Bcik)

    def logits(self, query_BLND: tf.Tensor, cap: float) -> tf.Tensor:
        """Returns the float32 logits [B,L,N,K] of scaled queries."""
        batch, length, heads, dim = known_sizes(query_BLND.shape)
        blocks, keys = known_sizes(self.keys_BckD.shape)[1:3]
        query_BciND = tf.reshape(query_BLND, [batch, blocks, -1, heads, dim])
        logits_BciNk = tf.einsum("BciND,BckD->BciNk", query_BciND, self.keys_BckD)
        logits_BciNk = soft_cap(tf.cast(logits_BciNk, tf.float32), cap)
        logits_BciNk += self.bias_Bcik[:, :, :, None]
        return annotate(tf.reshape(logits_BciNk, [batch, length, heads, keys]), "BLNK")

    def mixed(self, weights_BLNK: tf.Tensor) -> tf.Tensor:
        """Returns the float32 sums [B,L,N,D] of keys times weights."""
        batch, length, heads, keys = known_sizes(weights_BLNK.shape)
        blocks, dim = self.keys_BckD.shape[1], self.keys_BckD.shape[3]
        weights_BciNk = tf.reshape(weights_BLNK, [batch, blocks, -1, heads, keys])
        mixed_BciND = tf.einsum("BciNk,BckD->BciND", weights_BciNk, self.keys_BckD)
        mixed_BLND = annotate(tf.reshape(mixed_BciND, [batch, length, heads, dim]), "BLND")
        return tf.cast(mixed_BLND, tf.float32)


def attend(query_BLND: tf.Tensor, parts: Sequence[KeyBlocks], softmax: SoftmaxOptions) -> tf.Tensor:
    """Returns the attention output [B,L,N,D] of scaled queries for the keys of all parts."""
    dtype = query_BLND.dtype
    logits = [part.logits(query_BLND, softmax.cap) for part in parts]
    largest = [tf.reduce_max(x_BLNK, -1, keepdims=True) for x_BLNK in logits]
    sinks = [] if softmax.sinks_N is None else [softmax.sinks_N[:, None]]
    largest_BLN1 = tf.stop_gradient(functools.reduce(tf.maximum, [*largest, *sinks]))
    weights = [tf.exp(x_BLNK - largest_BLN1) for x_BLNK in logits]
    sums = [tf.reduce_sum(x_BLNK, -1, keepdims=True) for x_BLNK in weights]
    total_BLN1 = tf.add_n([*sums, *(tf.exp(x_N1 - largest_BLN1) for x_N1 in sinks)])
    weights = [tf.cast(x_BLNK, dtype) for x_BLNK in weights]
    if softmax.dropout is not None:
        counts = [x_BLNK.shape[-1] for x_BLNK in weights]
        shape = [*known_sizes(query_BLND.shape)[:3], sum(counts)]
        factors = tf.split(softmax.dropout.factors(shape, dtype), counts, -1)
        weights = [x_BLNK * y_BLNK for x_BLNK, y_BLNK in zip(weights, factors, strict=True)]
    mixed = [part.mixed(x_BLNK) for part, x_BLNK in zip(parts, weights, strict=True)]
    return tf.cast(tf.add_n(mixed) / total_BLN1, dtype)


def _with_block_before(x_Bci: tf.Tensor, padding: int) -> tf.Tensor:
    """Returns blocks joined with the one before, which is padding for the first: [B,c,2i,...]."""
    sides = [[0, 0], [1, 0], *[[0, 0]] * (len(x_Bci.shape) - 2)]
    return tf.concat([tf.pad(x_Bci[:, :-1], sides, constant_values=padding), x_Bci], 2)
