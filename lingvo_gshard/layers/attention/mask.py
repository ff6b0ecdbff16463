"""AttentionMask: the keys that each query may attend to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.layers.attention.relative_bias import RelativeBias
from lingvo_gshard.sharding import annotate

# Added to the logit of a key that a query must not attend to.
MASKED = -1e9

# Segment of the keys that pad the last block of a row. No real token and no padding token has it.
BLOCK_PADDING = -1


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """The keys that each query of a packed row may attend to.

    A query attends to the keys of its own segment. Segment 0 is padding: it neither attends nor is
    attended to. Each attention kernel materializes the form of the mask that it needs.

    A mask can be an element of a `tf.nest` structure; its tensors are then the leaves.

    Attributes:
      segments_BL: int32 segments of the queries; None if each row is one segment without padding.
      key_segments_BK: int32 segments of the keys; None if keys have the segments of the queries.
      is_causal: whether a query attends only to keys at its own position and before it.
      window: largest distance between a query and a key; 0 means no limit.
      chunk: positions of a chunk if the segments are the chunks of texts; 0 if they are texts. The
        layers of a stack find their mask by it.
      first_query: position of the first query among the keys, an int or an int32 scalar.
      bias_B1LK: `bias()`, computed once for all layers that share the mask; None if each layer
        computes its own.
      learned_bias: a learned bias that these layers share; None without one.
      most_segments: the most segments of a row, whose segments are numbered 1, 2, ... and followed
        by padding; 0 if nothing is known of them.
    """

    segments_BL: tf.Tensor | None = None
    key_segments_BK: tf.Tensor | None = None
    is_causal: bool = False
    window: int = 0
    chunk: int = 0
    first_query: int | tf.Tensor = 0
    bias_B1LK: tf.Tensor | None = None
    learned_bias: RelativeBias | None = None
    most_segments: int = 0

    def key_segments(self) -> tf.Tensor | None:
        """Returns the int32 segments [B,K] of the keys, or None if each row is one segment."""
        return self.segments_BL if self.key_segments_BK is None else self.key_segments_BK

    def explicit_segments(
        self, query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the segments [B,L] of queries and [B,K] of keys, as ones if it has none."""
        if self.segments_BL is not None:
            keys = self.key_segments_BK
            return self.segments_BL, self.segments_BL if keys is None else keys
        batch, _, queries, _ = query_BNLD.shape
        keys = keys_BNKD.shape[2]
        return tf.ones([batch, queries], tf.int32), tf.ones([batch, keys], tf.int32)

    def with_bias(self) -> AttentionMask:
        """Returns this mask with its bias materialized. The mask must have segments."""
        keys_BK = self.key_segments()
        assert self.segments_BL is not None and keys_BK is not None
        queries, keys = (known_sizes(x.shape)[1] for x in (self.segments_BL, keys_BK))
        return dataclasses.replace(self, bias_B1LK=self.bias(queries, keys))

    def bias(self, queries: int, keys: int) -> tf.Tensor:
        """Returns the float32 bias [B,1,L,K], or [1,1,L,K], that is added to the logits.

        It is 0 where a query attends to a key, and a large negative number elsewhere.
        """
        if self.bias_B1LK is not None:
            return self.bias_B1LK
        distances_LK = self.distances(queries, keys)
        if self.segments_BL is None:
            visible_LK = distances_LK <= 0 if self.is_causal else tf.ones([queries, keys], tf.bool)
            return self._with_window(tf.where(visible_LK, 0.0, MASKED), distances_LK)[None, None]
        query_BL1 = annotate(self.segments_BL, "BL", reserved="N")[:, :, None]
        key_B1K = annotate(self.key_segments(), "BK", reserved="N")[:, None, :]
        visible_BLK = self._is_visible(query_BL1, key_B1K, distances_LK)
        bias_BLK = annotate(tf.where(visible_BLK, 0.0, MASKED), "BLK", reserved="N")
        return self._with_window(bias_BLK, distances_LK)[:, None]

    def block_bias(
        self, query_segments: tf.Tensor, key_segments: tf.Tensor, distances: tf.Tensor
    ) -> tf.Tensor:
        """Returns the float32 bias [...,L,K] of a block of keys.

        Keys of segment `BLOCK_PADDING` get a weight of 0 even in rows that attend to no key.

        Args:
          query_segments: int32 [...,L,1].
          key_segments: int32 [...,1,K].
          distances: int32 [...,L,K], position of the key minus position of the query.
        """
        visible = self._is_visible(query_segments, key_segments, distances)
        bias = self._with_window(tf.where(visible, 0.0, MASKED), distances)
        return tf.where(tf.equal(key_segments, BLOCK_PADDING), 4 * MASKED, bias)

    def distances(self, queries: int, keys: int) -> tf.Tensor:
        """Returns int32 [L,K]: the position of each key minus the position of each query."""
        return tf.range(keys)[None, :] - (self.first_query + tf.range(queries)[:, None])

    def _is_visible(
        self, query_segments: tf.Tensor, key_segments: tf.Tensor, distances: tf.Tensor
    ) -> tf.Tensor:
        visible = tf.equal(query_segments, key_segments) & (query_segments > 0)
        return visible & (distances <= 0) if self.is_causal else visible

    def _with_window(self, bias: tf.Tensor, distances: tf.Tensor) -> tf.Tensor:
        """Beltagy et al. 2020, arXiv 2004.05150, section 3.1."""
        if not self.window:
            return bias
        return bias + tf.where(tf.abs(distances) <= self.window, 0.0, MASKED)

    def __tf_flatten__(self) -> tuple[tuple[dict[str, Any], tuple[str, ...]], tuple]:
        """Splits the mask into static fields and tensors, for `tf.nest`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = {
            name: value
            for name, value in fields.items()
            if value is not None and not isinstance(value, (bool, int))
        }
        static = {name: value for name, value in fields.items() if name not in tensors}
        return (static, tuple(tensors)), tuple(tensors.values())

    @classmethod
    def __tf_unflatten__(
        cls, metadata: tuple[dict[str, Any], tuple[str, ...]], tensors: tuple
    ) -> AttentionMask:
        """Reverses `__tf_flatten__`."""
        static, names = metadata
        return cls(**static, **dict(zip(names, tensors, strict=True)))


@dataclasses.dataclass(frozen=True)
class Reach:
    """The part of a text that a position attends to; layers with the same reach share masks.

    Attributes:
      window: largest distance between a query and a key; 0 means no limit.
      chunk: positions of a chunk. A query attends to keys of its own chunk; 0 for no chunks.
    """

    window: int = 0
    chunk: int = 0


def mask_of_reach(masks: Sequence[AttentionMask], reach: Reach) -> AttentionMask:
    """Returns the mask with this reach among those that the layers of a stack share.

    Raises:
      ValueError: there is none.
    """
    found = {Reach(mask.window, mask.chunk): mask for mask in masks}
    if reach not in found:
        raise ValueError(f"masks of {list(found)}, but none of {reach}")
    return found[reach]
