"""Transformer layers and stacks in inference: new tokens of each row pass all layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from lingvo_gshard.core import NestedMap, face, layer_method, tf
from lingvo_gshard.layers import MASKED, Memory, Reach, TransformerLayer, TransformerStack
from lingvo_gshard.wings.inference.layers import attention, faces
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible, used_slots


@dataclasses.dataclass(frozen=True)
class InferenceInputs:
    """Inputs that all layers of a stack share when they compute new tokens."""

    view: CacheView
    visible: Mapping[Reach, Visible]
    mask_BL: tf.Tensor
    memory: Visible | None = None


@faces.decoding_weights.register(TransformerLayer)
def _(layer: TransformerLayer, theta: NestedMap) -> NestedMap:
    weights = NestedMap(theta)
    for name in ("self_attention", "cross_attention", "feed_forward", "input_gate"):
        if name in layer.children:
            weights[name] = faces.decoding_weights(getattr(layer, name), theta[name])
    return weights


@layer_method
@face
def extend_layer(
    layer: TransformerLayer,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    shared: InferenceInputs,
    cache: NestedMap | None = None,
    memory: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap, tf.Tensor | None]:
    """Computes new tokens of each row in a Transformer layer.

    Args:
      theta: `decoding_weights` of the layer.
      cache: keys and values of the self-attention; None if the slots are the new tokens.
      memory: keys and values of the memory, if the layer has cross-attention.

    Returns:
      The output [B,L,M], the cache with the new tokens, and the weights [B,N,L,K] of the
      cross-attention, or None.
    """
    entered_BLM = layer.enter("self_attention", theta, x_BLM)
    visible = shared.visible[layer.self_attention.reach]
    h_BLM, extended = faces.extend(
        layer.self_attention, theta.self_attention, entered_BLM, shared.view, visible, cache
    )
    x_BLM, weights_BNLK = layer.add("self_attention", theta, x_BLM, h_BLM), None
    if layer.p.has_cross_attention:
        assert memory is not None and shared.memory is not None
        h_BLM = layer.enter("cross_attention", theta, x_BLM)
        h_BLM, weights_BNLK = attention.attend_to_memory(
            layer.cross_attention, theta.cross_attention, h_BLM, memory, shared.memory
        )
        x_BLM = layer.add("cross_attention", theta, x_BLM, h_BLM)
    h_BLM = layer.enter_feed_forward(theta, x_BLM, entered_BLM)
    h_BLM = faces.infer(layer.feed_forward, theta.feed_forward, h_BLM, shared.mask_BL)
    x_BLM = layer.add("feed_forward", theta, x_BLM, h_BLM)
    return layer.observe(x_BLM), extended, weights_BNLK


@faces.decoding_weights.register(TransformerStack)
def _(stack: TransformerStack, theta: NestedMap) -> NestedMap:
    """Returns the weights of each layer separately, in order."""
    layers = [faces.decoding_weights(layer, weights) for layer, weights in stack.unrolled(theta)]
    weights = NestedMap(layers=layers)
    for name in ("shared_relative_bias", "input_norm", "final_norm", "reader", "layer_inputs"):
        if name in stack.children:
            weights[name] = faces.decoding_weights(getattr(stack, name), theta[name])
    return weights


@face
def around_layers(
    stack: TransformerStack, theta: NestedMap, x_BLM: tf.Tensor
) -> contextlib.AbstractContextManager:
    """Returns a context manager for the loop over the layers of a stack."""
    del stack, theta, x_BLM
    return contextlib.nullcontext()


@layer_method
def extend_stack(
    stack: TransformerStack,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    mask_BL: tf.Tensor,
    view: CacheView,
    caches: Sequence[NestedMap] | None = None,
    memory: NestedMap | None = None,
) -> tuple[tf.Tensor, list[NestedMap], tf.Tensor | None]:
    """Computes new tokens of each row; see `models.extend_texts`. The output is normalized."""
    layers = stack.layers_in_order()
    table = stack.learned_bias(theta)
    bias = table and table.at(view.distances_LK)
    visible = {reach: view.visible(mask_BL, reach, bias) for reach in stack.by_reach()}
    visible_memory = None
    if memory is not None:
        bias_B1K = memory.bias_BK[:, None]
        visible_memory = Visible(bias_B1K, used_slots(bias_B1K, mask_BL))
    shared = InferenceInputs(view, visible, mask_BL, visible_memory)
    extended, weights_BNLK = [], None
    with around_layers(stack, theta, x_BLM):
        x_BLM = stack.begin(theta, x_BLM)
        for index, (layer, weights) in enumerate(zip(layers, theta.layers, strict=True)):
            x_BLM, cache, weights_BNLK = extend_layer(
                layer,
                weights,
                x_BLM,
                shared,
                None if caches is None else caches[index],
                None if memory is None else memory.layers[index],
            )
            extended.append(cache)
    return stack.finish(theta, x_BLM), extended, weights_BNLK


@layer_method
def cache_memory(stack: TransformerStack, theta: NestedMap, memory: Memory) -> NestedMap:
    """Computes `layers` and `bias_BK` of a memory, a segment in each row, for `extend_stack`."""
    layers = [
        attention.cache_memory(layer.cross_attention, weights.cross_attention, memory.output_BKM)
        for layer, weights in zip(stack.layers_in_order(), theta.layers, strict=True)
    ]
    bias_BK = tf.where(tf.not_equal(memory.segments_BK, 0), 0.0, MASKED)
    return NestedMap(layers=layers, bias_BK=bias_BK)


def stack_cache_shapes(
    stack: TransformerStack, rows: int, slots: int
) -> list[dict[str, tuple[int, ...]]]:
    """Returns `cache_shapes` of each layer."""
    return [
        faces.cache_shapes(layer.self_attention, rows, slots) for layer in stack.layers_in_order()
    ]


def stack_state_shapes(
    stack: TransformerStack, rows: int, positions: int
) -> list[dict[str, tuple[int, ...]]]:
    """Returns `state_shapes` of each layer."""
    attentions = [layer.self_attention for layer in stack.layers_in_order()]
    return [faces.state_shapes(attention, rows, positions) for attention in attentions]


def stack_memory_shapes(
    stack: TransformerStack, rows: int, positions: int
) -> list[dict[str, tuple[int, ...]]]:
    """Returns the shapes [B,N,K,D] of each layer in `cache_memory`, by name; [] without it."""
    layers = stack.layers_in_order() if stack.p.is_decoder else []
    return [attention.slot_shapes(layer.cross_attention, rows, positions) for layer in layers]
