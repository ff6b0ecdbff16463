"""Which keys a query sees, as what is added to its logits, by the segments of packed rows."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.layers.attention.relative_bias import MASKED, window_bias
from lingvo_gshard.sharding import annotate

# No sentence's segment, nor padding's: that of the keys that fill up the last block of some.
BEHIND = -1


def segment_bias(
    query_segments_BL: tf.Tensor, memory_segments_BK: tf.Tensor, causal: bool = False
) -> tf.Tensor:
    """Returns float32 [B,1,L,K]: 0 where a query may see a key, else a large negative number.

    A query sees the keys of its own segment; segment 0 is padding, and a causal query sees no key
    that stands after it in the row.
    """
    query_BL1 = annotate(query_segments_BL, "BL", reserved="N")[:, :, None]
    memory_segments_BK = annotate(memory_segments_BK, "BK", reserved="N")
    distances_LK = None
    if causal:
        length = query_segments_BL.shape[1]
        distances_LK = tf.range(length)[None, :] - tf.range(length)[:, None]
    visible_BLK = _visible(query_BL1, memory_segments_BK[:, None, :], distances_LK)
    return annotate(tf.where(visible_BLK, 0.0, MASKED), "BLK", reserved="N")[:, None]


def block_bias(
    query_segments: tf.Tensor,
    key_segments: tf.Tensor,
    distances: tf.Tensor,
    is_causal: bool,
    window: int,
) -> tf.Tensor:
    """Returns `segment_bias` of a block of keys, its window, and less yet for keys `BEHIND`.

    query_segments [...,L,1], key_segments [...,1,K]. distances: int32, of keys less queries in the
    row. window: 0 without. The result is float32 [...,L,K].
    """
    visible = _visible(query_segments, key_segments, distances if is_causal else None)
    bias = tf.where(visible, 0.0, MASKED)
    if window:
        bias += window_bias(distances, window)
    return tf.where(tf.equal(key_segments, BEHIND), 4 * MASKED, bias)


def _visible(
    query_segments: tf.Tensor, key_segments: tf.Tensor, distances: tf.Tensor | None
) -> tf.Tensor:
    """Whether a query sees a key; by distances, where it sees none behind it."""
    visible = tf.equal(query_segments, key_segments) & (query_segments > 0)
    return visible if distances is None else visible & (distances <= 0)
