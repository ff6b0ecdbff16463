"""The interfaces that decoding needs of a model; tasks implement them."""

from __future__ import annotations

from typing import Protocol

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.stacks.transformer_layer import Memory


class StepwiseModel(Protocol):
    """A model that gives the logits of one position after another."""

    def decode_step(
        self,
        theta: NestedMap,
        ids_B: tf.Tensor,
        active_B: tf.Tensor,
        step: tf.Tensor,
        cache: NestedMap,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Computes one position of every row.

        Args:
          theta: weights of the model.
          ids_B: int32 ids at position `step`.
          active_B: int32, 0 for rows that have ended; these take no capacity slot of any expert.
          step: int32 scalar, the position.
          cache: keys and values of the positions before `step`.

        Returns:
          float32 logits [B,V] of position `step` + 1, and the cache with position `step` added.
        """
        ...


class LanguageModel(StepwiseModel, Protocol):
    """A model that continues texts."""

    def init_cache(self, theta: NestedMap, batch: int, length: int) -> NestedMap:
        """Returns an empty cache for `batch` rows of up to `length` positions."""
        ...


class TranslationModel(StepwiseModel, Protocol):
    """A model that translates sentences by an encoder and a decoder."""

    @property
    def max_positions(self) -> int:
        """The largest number of positions in a sentence."""
        ...

    def encode(
        self, theta: NestedMap, ids_BK: tf.Tensor, segments_BK: tf.Tensor, positions_BK: tf.Tensor
    ) -> Memory:
        """Returns the encoder's output, which the decoder attends to."""
        ...

    def init_cache(self, theta: NestedMap, memory: Memory, length: int) -> NestedMap:
        """Returns an empty cache for one translation of up to `length` tokens per memory row."""
        ...

    def reorder_cache(self, cache: NestedMap, rows_B: tf.Tensor) -> NestedMap:
        """Returns the cache whose row i is row rows[i] of the given one."""
        ...
