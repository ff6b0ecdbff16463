"""Gated delta nets in inference: the cache of a text has a constant size."""

from __future__ import annotations

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.inference.layers.cached import CacheView, Visible
from lingvo_gshard.inference.layers.faces import (
    cache_shapes,
    decoding_weights,
    extend,
    state_shapes,
)
from lingvo_gshard.inference.stored_weights import store
from lingvo_gshard.published_layers.gated_delta_net import CONVOLVED, FROM_INPUT, GatedDeltaNet

LOCAL_LETTERS = {
    "r": "values of each key head",
    "d": "size of a value",
    "f": "all that is computed from the input for a key head",
    "t": "tokens that the convolution reads",
}


@decoding_weights.register(GatedDeltaNet)
def _(layer: GatedDeltaNet, theta: NestedMap) -> NestedMap:
    """Joins the products with the input beforehand."""
    joined = {f"w_{name}" for name in FROM_INPUT}
    weights = NestedMap({name: w for name, w in theta.items() if name not in joined})
    weights.w_input = store(layer.joined_weights(theta), "MNf", "M")
    weights.w_out = store(theta.w_out, "NrdM", "Nrd")
    return weights


@extend.register(GatedDeltaNet)
def _(
    layer: GatedDeltaNet,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Caches `state` and `recent`, the inputs of the convolution that the next token also reads.

    Without a cache, the new tokens are rows that end with their texts.

    Raises:
      UserError: several hypotheses of a beam extend the same row.
    """
    del visible
    if cache is None:
        assert view.mask is not None and view.mask.segments_BL is not None
        y_BLM, state_BNrDd, recent_BNtf = layer.run_rows(theta, x_BLM, view.mask.segments_BL)
        return y_BLM, NestedMap(state=state_BNrDd, recent=recent_BNtf)
    batch, length, _ = known_sizes(x_BLM.shape)
    if length > 1:
        raise UserError(
            f"{layer.path}: a state belongs to one text, and {length} hypotheses of a beam "
            "would share it; beam_size=1 was expected"
        )
    shapes = state_shapes(layer, batch)
    # A text that begins finds what the last text of its row has left.
    is_old_B111 = tf.cast(view.positions_BL > 0, tf.float32)[:, :, None, None]
    state_BNrDd = tf.reshape(cache.state, shapes["state"]) * is_old_B111[..., None]
    recent_BNtf = tf.reshape(cache.recent, shapes["recent"]) * is_old_B111
    y_BLM, state_BNrDd, recent_BNtf = layer.run_step(theta, x_BLM, state_BNrDd, recent_BNtf)
    return y_BLM, NestedMap(
        state=tf.reshape(state_BNrDd, cache.state.shape),
        recent=tf.reshape(recent_BNtf, cache.recent.shape),
    )


@cache_shapes.register(GatedDeltaNet)
def _(layer: GatedDeltaNet, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Returns no shapes: states have no slots."""
    del layer, rows, slots
    return {}


@state_shapes.register(GatedDeltaNet)
def _(layer: GatedDeltaNet, rows: int) -> dict[str, tuple[int, ...]]:
    p = layer.p
    convolved = sum(layer.features[name] for name in CONVOLVED)
    return {
        "state": (rows, p.num_heads, p.values_per_head, p.head_dim, layer.value_dim),
        "recent": (rows, p.num_heads, p.convolution_width - 1, convolved),
    }
