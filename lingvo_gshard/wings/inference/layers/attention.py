"""Multi-head attention in inference: weights joined for each product, and keys in a cache."""

from __future__ import annotations

import math

from lingvo_gshard.core import NestedMap, layer_method, tf
from lingvo_gshard.layers import (
    Attention,
    CrossAttention,
    MultiHeadAttention,
    RelativeBias,
    SelfAttention,
    heads_first,
    multi_head_attention,
    repeat_heads,
    rotary,
)
from lingvo_gshard.sharding import annotate, current_partitioning, platform_in_use
from lingvo_gshard.wings.inference.layers import cached
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible
from lingvo_gshard.wings.inference.layers.cached_fused import attend_slots
from lingvo_gshard.wings.inference.layers.faces import cache_shapes, decoding_weights, extend
from lingvo_gshard.wings.inference.stored_weights import store


@decoding_weights.register(MultiHeadAttention)
def _(layer: MultiHeadAttention, theta: NestedMap) -> NestedMap:
    """Joins the weights of each product beforehand.

    Compilers for TPUs and GPUs would copy weights [M,N,D] before each call, since a tile holds
    two neighboring dimensions: there M is last.
    """
    products = layer.joined_products()
    joined = {name for names in products for name in names}
    weights = NestedMap({name: w for name, w in theta.items() if name not in joined})
    # Biases and norms of each head would need to be repeated, too.
    has_sizes_by_head = (
        layer.p.use_bias or layer.p.qk_norm and "num_heads" in layer.p.query_key_norm
    )
    for names in products:
        w_MND = multi_head_attention.join(theta, names)
        if w_MND.shape[1] == layer.key_value_heads and not has_sizes_by_head:
            w_MND = tf.repeat(w_MND, cached_heads(layer) // layer.key_value_heads, axis=1)
        w_MND = annotate(w_MND, "MND", "weights")
        if platform_in_use():
            w_NDM = annotate(tf.transpose(w_MND, (1, 2, 0)), "NDM", "weights")
            weights[multi_head_attention.transposed_name(names)] = store(w_NDM, "NDM", "M")
        else:
            weights[multi_head_attention.joined_name(names)] = store(w_MND, "MND", "M")
    weights.w_out = store(theta.w_out, "NDM", "ND")
    return weights


@extend.register(SelfAttention)
def extend_row(
    layer: SelfAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Caches `key` and `value`, with the heads of `cached_heads`."""
    positions = rotary.positions_so_far(view.positions_BL, layer.scaling)
    query_BLND, key_BLND, value_BLND, gate_BLND = layer.project_row(theta, x_BLM, positions)
    new = NestedMap(key=_cached(layer, key_BLND), value=_cached(layer, value_BLND))
    if cache is None:
        slots = NestedMap(key=[new.key], value=[new.value])
    else:
        slots = cached.write(cache, new, view)
    own = layer.own_bias(theta)
    bias = visible.learned_bias if own is None else own.at(view.distances_LK)
    mixed_BLND, _ = mix_slots(layer, theta, query_BLND, slots, visible, bias)
    return layer.output(theta, mixed_BLND, gate_BLND), slots


@cache_shapes.register(SelfAttention)
def slot_shapes(layer: MultiHeadAttention, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes [B,N,K,D] of `key` and `value`, in a cache or of `cache_memory`."""
    shape = (rows, cached_heads(layer), slots)
    return {"key": (*shape, layer.head_dim), "value": (*shape, layer.value_dim)}


def cached_heads(layer: MultiHeadAttention) -> int:
    """Returns the number of heads of keys in a cache, where each may be repeated.

    If fewer heads than devices were cached, each device would have all of them. With repeated
    heads, a device has only those that its queries read.
    """
    heads, partitioning = layer.key_value_heads, current_partitioning()
    parts = partitioning.parts(partitioning.split("N")[0]) if partitioning else 1
    repeated = math.lcm(heads, parts)
    return repeated if layer.p.num_heads % repeated == 0 and repeated < heads * parts else heads


def _cached(layer: MultiHeadAttention, x_BKND: tf.Tensor) -> tf.Tensor:
    return repeat_heads(heads_first(x_BKND), cached_heads(layer))


@layer_method
def cache_memory(layer: CrossAttention, theta: NestedMap, memory_BKM: tf.Tensor) -> NestedMap:
    """Returns the keys and values of a memory, both lists of one block [B,N,K,D]."""
    keys_BKND, values_BKND = layer.project_memory(theta, memory_BKM)
    return NestedMap(key=[_cached(layer, keys_BKND)], value=[_cached(layer, values_BKND)])


@layer_method
def attend_to_memory(
    layer: CrossAttention, theta: NestedMap, x_BLM: tf.Tensor, memory: NestedMap, visible: Visible
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns the output [B,L,M] of new tokens and their weights [B,N,L,K] over the memory."""
    query_BLND = layer.project_query(theta, x_BLM)
    mixed_BLND, weights_BNLK = mix_slots(layer, theta, query_BLND, memory, visible)
    return layer.output(theta, mixed_BLND), weights_BNLK


@layer_method
def mix_slots(
    layer: Attention,
    theta: NestedMap,
    query_BLND: tf.Tensor,
    slots: NestedMap,
    visible: Visible,
    relative_bias: RelativeBias | None = None,
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns the weighted values [B,L,N,D] and the weights [B,N,L,K]; see `cached.attend`.

    A kernel of the hardware returns no weights: they are None.
    """
    query_BLND *= tf.constant(layer.query_scale, query_BLND.dtype)
    softmax = layer.softmax(theta, relative_bias)
    if layer.kernel.uses_fused:
        mixed_BLND = attend_slots(query_BLND, slots, visible, softmax)
        if mixed_BLND is not None:
            return mixed_BLND, None
    return cached.attend(query_BLND, slots, visible, softmax)
