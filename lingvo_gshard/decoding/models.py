"""The interfaces that decoding needs of a model; tasks implement them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.cached import CacheView


class DecodableModel(Protocol):
    """A model that predicts the next token of a text, given keys and values of the tokens before.

    Attributes:
      most_positions: the largest number of positions in a text; None if any number is possible.
    """

    @property
    def most_positions(self) -> int | None: ...

    def decoding_weights(self, theta: NestedMap) -> NestedMap:
        """Returns the weights as the other methods read them, computed once from theta."""
        ...

    def cache_shapes(self, rows: int, slots: int) -> list[dict[str, tuple[int, ...]]]:
        """Returns the shapes [B,N,K,D] of each layer's cache by name: `key`, and maybe `value`."""
        ...

    def memory_shapes(self, rows: int, positions: int) -> list[dict[str, tuple[int, ...]]]:
        """Returns the shapes [B,N,K,D] that each layer has in `encode_memory`; empty without."""
        ...

    def extend(
        self,
        theta: NestedMap,
        ids_BL: tf.Tensor,
        mask_BL: tf.Tensor,
        view: CacheView,
        caches: Sequence[NestedMap] | None = None,
        memory: NestedMap | None = None,
    ) -> tuple[tf.Tensor, list[NestedMap], tf.Tensor | None]:
        """Computes new tokens of each row.

        Args:
          theta: `decoding_weights`.
          ids_BL: int32 ids of the new tokens.
          mask_BL: int32, 0 for tokens that are padding; these use no expert.
          view: positions of the new tokens, and the slots that they write to and see.
          caches: the arrays of `cache_shapes`, each a list of blocks; None if the slots are the new
            tokens themselves.
          memory: what `encode_memory` returned; None for a model without one.

        Returns:
          The output [B,L,M], the caches with the new tokens, and the weights [B,N,L,K] over the
          memory in the last layer, or None.
        """
        ...

    def next_logits(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns float32 logits [B,L,V] of the token after each position of `extend`'s output."""
        ...


class TranslationModel(DecodableModel, Protocol):
    """A decodable model that attends to an encoded source sentence."""

    def encode_memory(self, theta: NestedMap, ids_BK: tf.Tensor) -> NestedMap:
        """Encodes source sentences, one per row.

        Args:
          theta: `decoding_weights`.
          ids_BK: int32 ids, NO_TOKEN in padding.

        Returns:
          `layers`, the keys and values that each layer of the decoder attends to, and `bias_BK`.
        """
        ...
