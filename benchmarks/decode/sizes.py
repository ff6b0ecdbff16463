"""Sizes of dense models that have the active FLOPs of ours."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.tasks.token_task import TokenTask
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.model_facts import ModelFacts


@dataclasses.dataclass(frozen=True)
class DenseSizes:
    """The sizes of a dense Transformer.

    Attributes:
      model_dim: M.
      num_heads: N.
      encoder_layers: layers of the encoder; 0 without one.
      encoder_hidden: hidden dimension of the encoder's feed-forward layers.
      decoder_layers: layers of the decoder.
      decoder_hidden: hidden dimension of the decoder's feed-forward layers.
      vocabulary_size: V.
      eos_id: id that ends a text.
      positions: positions of a text.
    """

    model_dim: int
    num_heads: int
    encoder_layers: int
    encoder_hidden: int
    decoder_layers: int
    decoder_hidden: int
    vocabulary_size: int
    eos_id: int
    positions: int


def dense_sizes(task: TokenTask, facts: ModelFacts) -> DenseSizes:
    """Returns the sizes of a dense model with the FLOPs that a token needs in `task`.

    All of its layers have the same hidden dimension, with two products and an activation. Routing
    and gated activations of `task` count as the products that they are.
    """
    has_encoder = isinstance(task, TranslationTask)
    return DenseSizes(
        model_dim=task.p.model_dim,
        num_heads=task.decoder.p.num_heads,
        encoder_layers=task.encoder.p.num_layers if has_encoder else 0,
        encoder_hidden=_hidden(task.encoder) if has_encoder else 0,
        decoder_layers=task.decoder.p.num_layers,
        decoder_hidden=_hidden(task.decoder),
        vocabulary_size=facts.vocabulary_size,
        eos_id=facts.end_ids[0],
        # One more for the id before all texts.
        positions=max(facts.most_positions, facts.most_source) + 1,
    )


def _hidden(stack: TransformerStack) -> int:
    """Returns the mean hidden dimension of a stack's active feed-forward layers."""
    layers = stack.layers_in_order()
    count = sum(flops(layer.feed_forward, TokenShape(1, 1)) for layer in layers)
    return max(round(count / len(layers) / (4 * stack.p.model_dim)), 1)
