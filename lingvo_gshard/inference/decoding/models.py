"""The interfaces that decoding needs of a model; tasks implement them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.layers.attention.cached import CacheView, row_view
from lingvo_gshard.layers.moe.load_metrics import TOKEN_GATES
from lingvo_gshard.tasks.model_facts import NO_TOKEN


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

    def state_shapes(self, rows: int) -> list[dict[str, tuple[int, ...]]]:
        """Returns the shapes [B,N,...] of the arrays in each layer's cache without slots, by name.

        They have the type float32, and what all tokens of a text so far have left.
        """
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
          caches: the arrays of `cache_shapes`, each a list of blocks, and the arrays of
            `state_shapes`; None if the slots are the new tokens themselves.
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


def expert_gates(
    model: DecodableModel,
    weights: NestedMap,
    ids_BL: tf.Tensor,
    source_BK: tf.Tensor | None = None,
) -> list[tuple[str, tf.Tensor]]:
    """Returns the gates of the experts that compute each token, as in decoding.

    Args:
      model: the model.
      weights: `decoding_weights` of the model.
      ids_BL: int32 tokens of each text, starting with the token before all texts; NO_TOKEN in the
        padding after the text.
      source_BK: int32 tokens of each source, NO_TOKEN in the padding; None for a model without
        sources.

    Returns:
      (path, gates) for each layer with experts, in the order of computation: the layer's path and
      the float32 gates [B,K,E] of the source or [B,L,E] of the text. The gate of an expert that
      does not compute a token is 0. Layers of a compiled loop share a path.
    """
    found = []

    def observe(path: str, value: tf.Tensor) -> None:
        layer, _, name = path.rpartition("/")
        if name == TOKEN_GATES:
            found.append((layer, value))

    with context.scope(training=False, on_output=observe):
        translates = cast(TranslationModel, model)
        memory = None if source_BK is None else translates.encode_memory(weights, source_BK)
        is_token_BL = tf.not_equal(ids_BL, NO_TOKEN)
        view, mask_BL = row_view(is_token_BL, is_causal=True), tf.cast(is_token_BL, tf.int32)
        model.extend(weights, tf.maximum(ids_BL, 0), mask_BL, view, None, memory)
    return found


# Bytes of the float32 logits that exist at once: of long texts and large vocabularies, all of them
# would take gigabytes.
_LOGITS_BYTES = 1 << 28


def token_scores(
    model: DecodableModel, weights: NestedMap, ids_BL: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns how likely each token of complete texts is, given the tokens before it.

    Args:
      model: the model, which reads no source.
      weights: `decoding_weights` of the model.
      ids_BL: int32 [B,L+1], the tokens of each text, NO_TOKEN in the padding after the text.

    Returns:
      Three arrays [B,L], each with a value for every token but the first: the float32
      log-probability of the token, the int32 token that is likeliest at this place, and the float32
      log-probability of the likeliest token. Values in padding have no meaning.
    """
    with context.scope(training=False):
        next_BL, ids_BL = tf.maximum(ids_BL[:, 1:], 0), ids_BL[:, :-1]
        is_token_BL = tf.not_equal(ids_BL, NO_TOKEN)
        view, mask_BL = row_view(is_token_BL, is_causal=True), tf.cast(is_token_BL, tf.int32)
        x_BLM, _, _ = model.extend(weights, tf.maximum(ids_BL, 0), mask_BL, view, None, None)
        rows, length = known_sizes(ids_BL.shape)
        size = known_sizes(model.next_logits(weights, x_BLM[:, :1]).shape)[-1]
        at_once = max(_LOGITS_BYTES // (4 * rows * size), 1)
        parts = []
        for begin in range(0, length, at_once):
            part = slice(begin, begin + at_once)
            logits_BLV = model.next_logits(weights, x_BLM[:, part])
            log_z_BL = tf.reduce_logsumexp(logits_BLV, -1)
            chosen_BL = tf.gather(logits_BLV, next_BL[:, part], batch_dims=2)
            largest_BL = tf.reduce_max(logits_BLV, -1)
            best_BL = tf.argmax(logits_BLV, -1, output_type=tf.int32)
            parts.append((chosen_BL - log_z_BL, best_BL, largest_BL - log_z_BL))
        found, best, largest = (tf.concat(each, 1) for each in zip(*parts, strict=True))
        return found, best, largest
