"""Stacks whose layers have one sublayer each: an attention, or a feed-forward layer.

Nemotron-H has them (arXiv 2504.03624, section 2.1).
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core import Layer, NestedMap, Params, TokenShape, UserError, layer_method, tf
from lingvo_gshard.layers import AttentionMask, TransformerLayer, TransformerStack, inherit
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import extend
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible
from lingvo_gshard.wings.published_layers.recurrence import CausalMixer


class NoAttention(CausalMixer):
    """Stands in place of the self-attention that a layer lacks."""

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask: AttentionMask) -> tf.Tensor:
        """Returns x."""
        del theta, mask
        return x_BLM


class NoFeedForward(Layer):
    """Stands in place of the feed-forward layer that a layer lacks."""

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
        """Returns x."""
        del theta, mask_BL
        return x_BLM


class SingleSublayer(TransformerLayer):
    """A Transformer layer that leaves out the sublayers that it lacks, with their norms."""

    def _create_sublayer(self, name: str, params: Params) -> None:
        super()._create_sublayer(name, params)
        if self._lacks(name):
            for norm in (f"{name}_norm", f"{name}_output_norm"):
                self._children.pop(norm, None)

    def _lacks(self, name: str) -> bool:
        return isinstance(getattr(self, name), (NoAttention, NoFeedForward))

    def enter(self, name: str, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns the input of a sublayer."""
        return x if self._lacks(name) else super().enter(name, theta, x)

    def add(self, name: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        """Returns the input x of a sublayer with its output h added."""
        return x if self._lacks(name) else super().add(name, theta, x, h)


class SingleSublayerStack(TransformerStack):
    """A stack of `SingleSublayer`, with a pattern of feed-forward layers beside the attentions'."""

    @classmethod
    def params(cls) -> Params:
        p = super().params().set(layer=SingleSublayer.params(), moe_every=0)
        p.define(
            "feed_forward_pattern",
            (),
            "Params of the feed-forward layers of consecutive layers; as long as "
            "attention_pattern. NoAttention and NoFeedForward stand for what a layer lacks.",
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        attentions, others = len(params.attention_pattern), len(params.feed_forward_pattern)
        if attentions != others or not others or params.moe_every:
            raise UserError(
                f"{path}.feed_forward_pattern has {others} entries, {path}.attention_pattern has "
                f"{attentions}, and {path}.moe_every is {params.moe_every}; equal numbers above 0 "
                "and moe_every = 0 were expected"
            )
        super().__init__(params, path)

    def layer_params(self, index: int) -> Params:
        """Returns the Params of layer `index`, with all that the stack sets."""
        p, layer = self.p, super().layer_params(index)
        own = p.feed_forward_pattern[index % len(p.feed_forward_pattern)]
        own = inherit(own, hidden_dim=p.hidden_dim)
        made: Any = own.cls
        layer.feed_forward = made.for_stack(own, self.is_causal, p.has_token_ids)
        return layer


@flops.register(NoAttention)
@flops.register(NoFeedForward)
def _(layer: Layer, shape: TokenShape) -> int:
    """Counts nothing."""
    del layer, shape
    return 0


@extend.register(NoAttention)
def _(
    layer: NoAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Caches nothing."""
    del layer, theta, view, visible, cache
    return x_BLM, NestedMap()
