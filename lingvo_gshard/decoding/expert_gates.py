"""The experts that each token of a text visits, by one pass over the complete text."""

from __future__ import annotations

from typing import cast

from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.decoding.kinds import NO_TOKEN
from lingvo_gshard.decoding.models import DecodableModel, TranslationModel
from lingvo_gshard.layers.attention.cached import row_view
from lingvo_gshard.layers.moe.layer import TOKEN_GATES


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
      ids_BL: int32 tokens of each text, that before all texts first; NO_TOKEN in the
        padding after them.
      source_BK: int32 tokens of each source, NO_TOKEN in the padding; None for a model without one.

    Returns:
      (path of a layer, float32 gates [B,K,E] of the source or [B,L,E] of the text) for each layer
      with experts, in the order in which they compute. The gate of an expert that does not compute
      a token is 0. Layers of a compiled loop share a path.
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
