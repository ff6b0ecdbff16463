"""Useful floating-point operations (FLOPs) of layers and tasks.

- A multiply-add counts as two operations.
- Only matrix products count. Embeddings, norms, activations, dropout, losses and the optimizer do
  not.
- Attention counts the pairs of queries and keys that a mask of positions leaves visible: causal,
  within a window or a chunk. The segments of packed rows are data, so pairs of different segments
  count.
- Avoidable work does not count: MoE dispatch, empty capacity slots and rematerialization.
"""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import Layer, TokenShape, face
from lingvo_gshard.layers import (
    Attention,
    CrossAttention,
    Execution,
    Experts,
    FeedForward,
    LinearScores,
    MixtureOfExperts,
    MultiHeadAttention,
    Router,
    RouterPart,
    SelfAttention,
    Softmax,
)
from lingvo_gshard.tasks import FutureToken, LanguageModelTask, TokenTask, TranslationTask
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.fine_tuning.adapters import Adapters


@face
def flops(layer: Layer, shape: TokenShape) -> int:
    """Returns the number of useful operations of one forward pass of a layer.

    A class registers a function if it has matrix products of its own, or children that do not run
    exactly once each. Without one, the operations are the sum over the layer's children.
    """
    return sum(flops(child, shape) for child in layer.child_layers())


@flops.register(FeedForward)
def _(layer: FeedForward, shape: TokenShape) -> int:
    products = 3 if layer.activation.is_gated else 2
    return 2 * products * shape.tokens * layer.p.model_dim * layer.p.hidden_dim


@flops.register(Experts)
def _(layer: Experts, shape: TokenShape) -> int:
    """Counts one expert for each token."""
    products = 3 if layer.activation.is_gated else 2
    return 2 * products * shape.tokens * layer.p.model_dim * layer.p.hidden_dim


@flops.register(MixtureOfExperts)
def mixture_flops(layer: MixtureOfExperts, shape: TokenShape) -> int:
    """Counts the router, the shared expert, and the experts that a token uses."""
    used = layer.router.experts_per_token(layer.router.p)
    shared = flops(layer.shared, shape) if layer.p.shared_hidden_dim else 0
    return flops(layer.router, shape) + shared + round(used * flops(layer.experts, shape))


@flops.register(Router)
def _(layer: Router, shape: TokenShape) -> int:
    return sum(flops(part, shape) for part in layer.parts.values())


@flops.register(RouterPart)
def _(part: RouterPart, shape: TokenShape) -> int:
    del part, shape
    return 0


@flops.register(LinearScores)
def _(part: LinearScores, shape: TokenShape) -> int:
    return 2 * shape.tokens * part.p.model_dim * part.p.num_experts


@flops.register(Softmax)
def _(layer: Softmax, shape: TokenShape) -> int:
    return 2 * shape.tokens * layer.p.model_dim * layer.p.vocabulary_size


@flops.register(Adapters)
def _(layer: Adapters, shape: TokenShape) -> int:
    return 2 * shape.tokens * active_parameters(layer)


@flops.register(Execution)
def _(layer: Execution, shape: TokenShape) -> int:
    return layer.p.times * sum(flops(child, shape) for child in layer.child_layers())


@flops.register(SelfAttention)
def self_attention_flops(layer: SelfAttention, shape: TokenShape) -> int:
    """Returns the operations of a self-attention without a gate of its output."""
    return _attention_flops(layer, shape, shape.length, visible_pairs(layer, shape))


@flops.register(CrossAttention)
def _(layer: CrossAttention, shape: TokenShape) -> int:
    pairs = shape.length * shape.memory_length * shape.has_pairs
    return _attention_flops(layer, shape, shape.memory_length, pairs)


def _attention_flops(layer: MultiHeadAttention, shape: TokenShape, keys: int, pairs: int) -> int:
    """Returns the operations of the projections, of q k and of the weighted values."""
    p, both = layer.p, layer.head_dim + layer.value_dim
    weights = (shape.length * p.num_heads + keys * layer.key_value_heads) * both
    return 2 * shape.rows * (weights * p.model_dim + pairs * p.num_heads * both)


def visible_pairs(layer: Attention, shape: TokenShape) -> int:
    """Returns the pairs of a query and a key of a row that a self-attention's positions allow."""
    if not shape.has_pairs:
        return 0
    reach, length = layer.reach, shape.length
    chunk = min(reach.chunk or length, length)
    whole, rest = divmod(length, chunk)
    return sum(
        count * _pairs_of_chunk(size, reach.window, layer.p.is_causal)
        for count, size in ((whole, chunk), (1, rest))
    )


def _pairs_of_chunk(length: int, window: int, is_causal: bool) -> int:
    furthest = min(window or length, length - 1) if length else 0
    # Keys before their queries. The first queries of a row have fewer than the window allows.
    before = furthest * (furthest + 1) // 2 + (length - 1 - furthest) * furthest if length else 0
    return length + before * (1 if is_causal else 2)


@flops.register(FutureToken)
def _(layer: FutureToken, shape: TokenShape) -> int:
    children = sum(flops(child, shape) for child in layer.child_layers())
    return children + 2 * 2 * shape.tokens * layer.p.model_dim**2


@flops.register(TokenTask)
def token_task_flops(task: TokenTask, shape: TokenShape) -> int:
    """Returns the operations of the decoder and of the softmax."""
    return flops(task.decoder, shape) + _softmax_flops(task, shape)


def _softmax_flops(task: TokenTask, shape: TokenShape) -> int:
    return 2 * shape.tokens * task.p.model_dim * task.shared_embedding.p.vocabulary_size


@flops.register(TranslationTask)
def _(task: TranslationTask, shape: TokenShape) -> int:
    of_encoder = dataclasses.replace(shape, length=shape.memory_length, memory_length=0)
    encoder = flops(task.encoder, of_encoder)
    return encoder + token_task_flops(task, shape)


@flops.register(LanguageModelTask)
def _(task: LanguageModelTask, shape: TokenShape) -> int:
    """Counts a pass in training, with the predictions further ahead."""
    future = task.future if task.p.future_tokens else []
    more = sum(flops(module, shape) + _softmax_flops(task, shape) for module in future)
    return token_task_flops(task, shape) + more
