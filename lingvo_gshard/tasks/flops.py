"""Useful floating-point operations of a training step, and active weights, from layers' sizes.

A multiply-add is two operations. With T = B * L tokens, a forward pass takes

    feed-forward           2 T M H + 2 T H M, and 2 T M H more where it is gated
    mixture of experts     2 T M E for the router, and a feed-forward for each expert of a token
                           and for the shared one
    self-attention         4 * 2 T M N D for the projections, 2 * 2 B L L N D for the rest
    cross-attention        2 * 2 B L M N D + 2 * 2 B K M N D, and 2 * 2 B L K N D
    softmax                2 T M V

and a training step three times that: a product's gradient is two products of its size. Keys and
values are projected to as many heads as they have, where those are fewer than N. Rows count in
full, packed, causal or seen through a window. Not counted, because a better program would do
without: dispatch, places in experts' buffers that stay empty, what is computed twice; nor, being no
products: embeddings, norms, activations, dropout, losses and the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.layers.attention.multi_head_attention import MultiHeadAttention
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.transformer import TransformerStack


def stack_flops(stack: TransformerStack, shape: TokenShape) -> int:
    """Returns the operations of one forward pass of a stack."""
    rows, length = shape.rows, shape.length
    total = 0
    for layer, times in stack.layer_counts():
        once = _attention(layer.self_attention, rows, length, length)
        if layer.p.has_cross_attention:
            once += _attention(layer.cross_attention, rows, length, shape.memory_length)
        total += times * (once + _feed_forward(layer.feed_forward, shape.tokens))
    return total


def _attention(layer: MultiHeadAttention, rows: int, queries: int, keys: int) -> int:
    inner = layer.p.num_heads * layer.head_dim
    shared = layer.key_value_heads * layer.head_dim
    projections = 2 * 2 * rows * (queries * inner + keys * shared) * layer.p.model_dim
    return projections + 2 * 2 * rows * queries * keys * inner


def _feed_forward(layer: Layer, tokens: int) -> int:
    p = layer.p
    if not isinstance(layer, MixtureOfExperts):
        return _dense(layer, tokens)
    router = 2 * tokens * p.model_dim * p.num_experts if layer.router.is_learned else 0
    shared = _dense(layer.shared, tokens) if p.shared_hidden_dim else 0
    return router + shared + round(_experts_per_token(layer) * _dense(layer.experts, tokens))


def _dense(layer: Layer, tokens: int) -> int:
    products = 3 if layer.activation.is_gated else 2
    return 2 * products * tokens * layer.p.model_dim * layer.p.hidden_dim


def _experts_per_token(layer: MixtureOfExperts) -> float:
    return layer.router.experts_per_token(layer.router.p)


def active_parameters(task: Layer) -> int:
    """Returns the number of weights that one token uses: all, but of experts those it is sent to.

    Of a layer's E experts these are as many as the layer's router chooses.
    """
    mixtures = list(_mixtures(task))
    total = 0.0
    for spec in task.variable_specs().flatten():
        count = math.prod(spec.shape)
        for layer in mixtures:
            if spec.path.startswith(f"{layer.experts.path}."):
                count *= _experts_per_token(layer) / layer.p.num_experts
        total += count
    return round(total)


def _mixtures(layer: Layer) -> Iterator[MixtureOfExperts]:
    """Yields the mixtures of experts among a layer and all below it."""
    if isinstance(layer, MixtureOfExperts):
        yield layer
        return
    for child in layer.children.values():
        for one in child if isinstance(child, list) else [child]:
            yield from _mixtures(one)
