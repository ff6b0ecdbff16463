"""Latent and indexed attention in inference: the cache has the latent vectors of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core.faces import face
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.inference.layers import cached
from lingvo_gshard.inference.layers.attention import mix_slots
from lingvo_gshard.inference.layers.cached import CacheView, Visible
from lingvo_gshard.inference.layers.faces import cache_shapes, decoding_weights, extend
from lingvo_gshard.inference.stored_weights import store
from lingvo_gshard.layers.attention import rotary
from lingvo_gshard.layers.attention.kernel import heads_first
from lingvo_gshard.layers.attention.rotary import TextPositions
from lingvo_gshard.published_layers.indexed_attention import IndexedAttention
from lingvo_gshard.published_layers.latent_attention import LatentAttention
from lingvo_gshard.sharding import annotate, einsum

LOCAL_LETTERS = {
    "q": "rank of queries",
    "r": "rank of keys and values",
    "d": "both ranks and the rotated key",
}


@decoding_weights.register(LatentAttention)
def _(layer: LatentAttention, theta: NestedMap) -> NestedMap:
    """Joins the products with the input beforehand."""
    joined = [f"w_{name}" for name in layer.down_products]
    weights = NestedMap({name: w for name, w in theta.items() if name not in joined})
    weights.w_down = store(annotate(layer.join_down(theta, "w"), "Md", "weights"), "Md", "M")
    first = "q" if layer.p.query_rank else "M"
    weights.w_query = store(theta.w_query, f"{first}ND", first)
    weights.w_out = store(theta.w_out, "NDM", "ND")
    return weights


@extend.register(LatentAttention)
def _(
    layer: LatentAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Caches `key`, [B,1,K,D] of latent vectors and rotated keys."""
    positions = rotary.positions_so_far(view.positions_BL, layer.scaling)
    query_BLND, latent_BLr, rotated_BLD, low_BLq = layer.project(theta, x_BLM, positions)
    new = NestedMap(key=tf.concat([latent_BLr, rotated_BLD], -1)[:, None])
    new.update(layer.index_keys(theta, x_BLM, positions))
    written = None if cache is None else cached.write(cache, new, view)
    filled = NestedMap({n: [x] for n, x in new.items()}) if written is None else written
    visible = restrict_slots(
        layer, theta, x_BLM, low_BLq, positions, visible, filled.get("index", [])
    )
    if written is None:
        keys_BNKD, values_BNKD = map(heads_first, layer.expand(theta, latent_BLr, rotated_BLD))
        slots = NestedMap(key=[keys_BNKD], value=[values_BNKD])
        mixed_BLND, _ = mix_slots(layer, theta, query_BLND, slots, visible)
        return layer.output(theta, mixed_BLND), filled
    plain_BLND, rotated_BLND = layer.split_query(query_BLND)
    latent_BLNr = einsum("BLND,rND->BLNr", plain_BLND, tf.cast(theta.w_key, x_BLM.dtype))
    query_BLND = annotate(tf.concat([latent_BLNr, rotated_BLND], -1), "BLND")
    # A value is the first part of a key. A copy of it would take longer than to mix the rest.
    slots = NestedMap(key=written.key, value=written.key)
    mixed_BLND, _ = mix_slots(layer, theta, query_BLND, slots, visible)
    mixed_BLNr = mixed_BLND[..., : layer.p.key_value_rank]
    values_BLND = einsum("BLNr,rND->BLND", mixed_BLNr, tf.cast(theta.w_value, x_BLM.dtype))
    return layer.output(theta, values_BLND), written


@cache_shapes.register(LatentAttention)
def _latent_shapes(layer: LatentAttention, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    return {"key": (rows, 1, slots, layer.p.key_value_rank + layer.p.rotary_dim)}


@cache_shapes.register(IndexedAttention)
def _(layer: IndexedAttention, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Adds `index`, the keys of the indexer."""
    return {**_latent_shapes(layer, rows, slots), "index": (rows, 1, slots, layer.p.index_dim)}


@face
def restrict_slots(
    layer: LatentAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    low_BLq: tf.Tensor,
    positions: TextPositions,
    visible: Visible,
    slots: Sequence[tf.Tensor],
) -> Visible:
    """Returns the slots that each new token attends to.

    Args:
      layer: the layer.
      theta: weights of the layer.
      x_BLM: the new tokens.
      low_BLq: what their queries are computed from.
      positions: their positions.
      visible: the slots that they see.
      slots: blocks of what `index_keys` returned for the token of each slot.
    """
    del layer, theta, x_BLM, low_BLq, positions, slots
    return visible


@restrict_slots.register(IndexedAttention)
def _(
    layer: IndexedAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    low_BLq: tf.Tensor,
    positions: TextPositions,
    visible: Visible,
    slots: Sequence[tf.Tensor],
) -> Visible:
    count = sum(known_sizes(block.shape)[-2] for block in slots)
    if count <= layer.p.index_topk:
        return visible
    index_BKD = tf.reshape(tf.concat(slots, -2), [x_BLM.shape[0], count, layer.p.index_dim])
    chosen_BLK = layer.choose(theta, x_BLM, low_BLq, positions, index_BKD, visible.bias_BLK)
    return dataclasses.replace(visible, bias_BLK=chosen_BLK, ring=None, mask=None)
