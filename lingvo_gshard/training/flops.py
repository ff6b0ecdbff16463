"""Useful floating-point operations of a training step, and active weights, from layers' sizes.

A multiply-add is two operations. With T = B * L tokens, a forward pass takes

    feed-forward           2 T M H + 2 T H M
    mixture of experts     2 T M E for the router, and a feed-forward for each expert of a token
    self-attention         4 * 2 T M N D for the projections, 2 * 2 B L L N D for the rest
    cross-attention        2 * 2 B L M N D + 2 * 2 B K M N D, and 2 * 2 B L K N D
    softmax                2 T M V

and a training step three times that: a product's gradient is two products of its size. Rows count
in full, packed or causal. Not counted, because a better program would do without: dispatch, places
in experts' buffers that stay empty, what is computed twice; nor, being no products: embeddings,
norms, activations, dropout, losses and the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lingvo_gshard.core.layer import Layer
from lingvo_gshard.layers.attention import MultiHeadAttention
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.transformer import TransformerStack
from lingvo_gshard.tasks.translation import TranslationTask

FORWARD_AND_BACKWARD = 3


def translation_step(task: TranslationTask, rows: int, source: int, target: int) -> int:
    """Returns the operations of a training step on `rows` of source and target positions."""
    p = task.p
    softmax = 2 * rows * target * p.model_dim * p.target_vocabulary_size
    encoder = _stack(task.encoder, rows, source)
    decoder = _stack(task.decoder, rows, target, memory=source)
    return FORWARD_AND_BACKWARD * (encoder + decoder + softmax)


def stack_step(stack: TransformerStack, rows: int, length: int) -> int:
    """Returns the operations of a training step of an encoder on `rows` of `length` positions."""
    return FORWARD_AND_BACKWARD * _stack(stack, rows, length)


def _stack(stack: TransformerStack, rows: int, length: int, memory: int = 0) -> int:
    total = 0
    for layer, times in stack.layers_by_times():
        once = _attention(layer.self_attention, rows, length, length)
        if layer.p.has_cross_attention:
            once += _attention(layer.cross_attention, rows, length, memory)
        total += times * (once + _feed_forward(layer.feed_forward, rows * length))
    return total


def _attention(layer: MultiHeadAttention, rows: int, queries: int, keys: int) -> int:
    inner = layer.p.num_heads * layer.head_dim
    projections = 2 * (2 * rows * queries + 2 * rows * keys) * layer.p.model_dim * inner
    return projections + 2 * 2 * rows * queries * keys * inner


def _feed_forward(layer: Layer, tokens: int) -> int:
    p = layer.p
    dense = 2 * 2 * tokens * p.model_dim * p.hidden_dim
    if not isinstance(layer, MixtureOfExperts):
        return dense
    router = 2 * tokens * p.model_dim * p.num_experts
    return router + layer.router.experts_per_token * dense


def active_parameters(task: Layer) -> int:
    """Returns the number of weights that one token uses: all, but of experts those it is sent to.

    Of a layer's E experts these are as many as the layer's router chooses.
    """
    chosen = dict(_experts_per_token(task))
    total = 0
    for spec in task.variable_specs().flatten():
        count = math.prod(spec.shape)
        layer = spec.path.rpartition(".")[0]
        if layer in chosen and "E" in spec.layout:
            count = count * chosen[layer] // spec.shape[spec.layout.index("E")]
        total += count
    return total


def _experts_per_token(layer: Layer) -> Iterator[tuple[str, int]]:
    """Yields (path of a layer with a router, how many experts that chooses for a token)."""
    for child in layer.children.values():
        for one in child if isinstance(child, list) else [child]:
            if hasattr(type(one), "experts_per_token"):
                yield layer.path, one.experts_per_token
            yield from _experts_per_token(one)
