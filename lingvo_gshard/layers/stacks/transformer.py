"""TransformerStack: Transformer layers, some of them with a mixture of experts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from lingvo_gshard.core import Layer, NestedMap, Params, UserError, layer_method, remat_policy, tf
from lingvo_gshard.layers.attention.mask import AttentionMask, Reach
from lingvo_gshard.layers.attention.relative_bias import RelativeBias, SharedRelativeBias
from lingvo_gshard.layers.attention.rotary import is_first_in_segment
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.execution import Sequential
from lingvo_gshard.layers.stacks.transformer_layer import Memory, TransformerLayer, inherit

_DROPOUTS = {
    "token_dropout_rate": "the stack's input tokens, each as a whole but not the first of a "
    "segment,",
    "input_dropout_rate": "the stack's input",
    "residual_dropout_rate": "each sublayer's output",
    "attention_dropout_rate": "the attention weights",
}


def is_expert_layer(stack: Params, index: int) -> bool:
    """Returns whether layer `index` of a stack with these Params has experts."""
    after, every = index - stack.dense_first, stack.moe_every
    return bool(every) and after >= 0 and (after + 1 + stack.moe_offset) % every == 0


class TransformerStack(Layer):
    """An encoder, a decoder that attends to a memory, or a causal stack, over packed rows.

    Every `moe_every`-th layer has a mixture of experts in place of its feed-forward layer. Arxiv
    2006.16668, section 2.2, has one in every other layer. The count begins after the `dense_first`
    layers, which have no experts (arXiv 2412.19437, section 4.2).

    `attention_pattern` alternates self-attentions, such as one with a window and one without
    (Gemma 2, arXiv 2408.00118, section 2).

    `execution` decides how the layers are run. It changes neither initial weights nor results.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("num_layers", 0, "Number of layers.", minimum=1, maximum=10_000)
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("num_heads", 0, "Size of N.", minimum=1)
        p.define("hidden_dim", 0, "Size of H, in feed-forward layers and in experts.", minimum=1)
        p.define("is_causal", False, "Whether no position attends to a later one.")
        p.define("is_decoder", False, "Whether the stack is causal and attends to a memory.")
        p.define("dense_first", 0, "Number of layers without experts before all others.", minimum=0)
        p.define("moe_every", 2, "Period of the layers with experts; 0: no experts.", minimum=0)
        p.define(
            "moe_offset", 0, "Layers between one with experts and the end of its period.", minimum=0
        )
        p.define("layer", TransformerLayer.params(), "Params of every layer.")
        p.define(
            "attention_pattern",
            (),
            "Params of the self-attentions of consecutive layers, repeated; empty: that of layer.",
        )
        p.define(
            "sequential_first",
            0,
            "Number of first layers that run one by one, before `execution` runs the others; at "
            "least dense_first do.",
            minimum=0,
        )
        p.define(
            "shared_relative_bias",
            SharedRelativeBias.params(),
            "Params of a relative position bias that all self-attentions share.",
        )
        p.define("has_input_norm", False, "Whether the input is normalized, before dropout.")
        p.define("has_final_norm", True, "Whether the output is normalized.")
        p.define("moe", MixtureOfExperts.params(), "Params of the mixtures of experts.")
        p.define("has_token_ids", False, "Whether callers set `token_context.tokens`.")
        p.define(
            "execution",
            Sequential.params(),
            "Params of how the layers are run: Sequential, Repeat or Pipeline of layers/stacks/.",
        )
        for name, dropped in _DROPOUTS.items():
            p.define_fraction(name, 0.0, f"Fraction of {dropped} that is dropped.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        token_dropout = Dropout.params().set(rate=p.token_dropout_rate, whole_vectors=True)
        self.create_child("token_dropout", token_dropout)
        self.create_child("input_dropout", Dropout.params().set(rate=p.input_dropout_rate))
        for name in ("dense_first", "sequential_first"):
            if p.get(name) > p.num_layers:
                raise UserError(
                    f"{path}.{name}: {p.get(name)} is not in 0 to {path}.num_layers, {p.num_layers}"
                )
        self._check_pattern()
        if p.has_input_norm:
            self.create_child("input_norm", inherit(p.layer.norm, model_dim=p.model_dim))
        path = f"{path}.execution"
        remat_policy.check(p.execution.rematerialize, f"{path}.rematerialize")
        layers = [self.layer_params(i) for i in range(p.num_layers)]
        count = self._sequential_first
        if count:
            execution = Sequential.params().set(rematerialize=p.execution.rematerialize)
            first = Sequential.for_layers(execution, layers[:count], 1, path)
            self.create_child("first_layers", first)
        period = math.lcm(max(p.moe_every, 1), len(p.attention_pattern) or 1)
        execution = p.execution.cls.for_layers(p.execution, layers[count:], period, path)
        self.create_child("layers", execution)
        if p.shared_relative_bias.buckets:
            self._create_shared_bias(layers[0].self_attention)
        if p.has_final_norm:
            self.create_child("final_norm", inherit(p.layer.norm, model_dim=p.model_dim))

    @property
    def _sequential_first(self) -> int:
        return max(self.p.dense_first, self.p.sequential_first)

    def _create_shared_bias(self, attention: Params) -> None:
        """Creates the relative bias of all layers, which have attentions like this one."""
        p = self.p
        obstacle = ""
        if "relative_buckets" not in attention or attention.relative_buckets:
            obstacle = f"{attention.cls and attention.cls.__name__}, which has none or its own"
        elif not attention.kernel.cls.supports_relative_bias:
            obstacle = f"{attention.kernel.cls.__name__}; choose DenseKernel"
        elif p.execution.cls.splits_shared(p.execution):
            obstacle = (
                f"{p.execution.cls.__name__}, which splits batches; choose Sequential or Repeat "
                "with interleaved = 1"
            )
        if obstacle:
            raise UserError(
                f"{self.path}.shared_relative_bias.buckets: {p.shared_relative_bias.buckets} is "
                f"not possible with {obstacle}"
            )
        bias = p.shared_relative_bias.copy()
        bias.set(num_heads=p.num_heads, is_causal=self.is_causal)
        self.create_child("shared_relative_bias", bias)

    def _check_pattern(self) -> None:
        """Raises ValueError if the attention pattern does not consist of Params that fit."""
        path = f"{self.path}.attention_pattern"
        for index, attention in enumerate(self.p.attention_pattern):
            if not isinstance(attention, Params):
                raise UserError(
                    f"{path}[{index}]: {attention!r} is not Params; give those of a class, such as "
                    "SelfAttention.params()"
                )
            if attention.kernel != self.p.attention_pattern[0].kernel:
                raise UserError(
                    f"{path}[{index}].kernel: {attention.kernel.cls.__name__} with other Params "
                    f"than {path}[0].kernel; one kernel for all layers was expected, because they "
                    "share masks"
                )

    @property
    def is_causal(self) -> bool:
        """Whether no position attends to a later one."""
        return self.p.is_causal or self.p.is_decoder

    def layer_params(self, index: int) -> Params:
        """Returns the Params of layer `index`, with all that the stack sets."""
        p = self.p
        layer = inherit(
            p.layer, model_dim=p.model_dim, residual_dropout_rate=p.residual_dropout_rate
        )
        if p.attention_pattern:
            pattern = p.attention_pattern
            layer.self_attention = pattern[index % len(pattern)]
        for name in ("self_attention", "cross_attention"):
            attention = inherit(
                layer.get(name), num_heads=p.num_heads, dropout_rate=p.attention_dropout_rate
            )
            setattr(layer, name, attention)
        layer.self_attention.is_causal = self.is_causal
        feed_forward = p.moe if is_expert_layer(p, index) else layer.feed_forward
        feed_forward = inherit(feed_forward, hidden_dim=p.hidden_dim)
        made: Any = feed_forward.cls
        layer.feed_forward = made.for_stack(feed_forward, self.is_causal, p.has_token_ids)
        layer.has_cross_attention = p.is_decoder
        return layer

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        segments_BL: tf.Tensor,
        memory: Memory | None = None,
    ) -> tf.Tensor:
        """Returns the normalized output [B,L,M]. A position depends only on its own segment.

        Args:
          segments_BL: int32 segment of each position, 0 in padding.
        """
        shared = [self._masks(theta, segments_BL)]
        if self.p.is_decoder:
            assert memory is not None, f"{self.path} is a decoder, which attends to a memory"
            layer = self.layers_in_order()[0]
            memory_mask = layer.cross_attention.mask(segments_BL, memory.segments_BK)
            shared += [memory.output_BKM, memory_mask]
        x_BLM = self._drop_tokens(theta, self.begin(theta, x_BLM), segments_BL)
        x_BLM = self.input_dropout.fprop(theta.input_dropout, x_BLM)
        if self._sequential_first:
            x_BLM = self.first_layers.fprop(theta.first_layers, x_BLM, *shared)
        self.layers.check_batch(x_BLM.shape[0], f"{self.path}.execution")
        x_BLM = self.layers.fprop(theta.layers, x_BLM, *shared)
        return self.observe(self.finish(theta, x_BLM))

    def _drop_tokens(self, theta: NestedMap, x_BLM: tf.Tensor, segments_BL: tf.Tensor) -> tf.Tensor:
        """Returns the input with tokens dropped, but never the first of a segment.

        In a causal stack the first token sees only itself. If the first token were dropped, its row
        would be zero in every layer. Each norm would then multiply its gradient by 1 /
        sqrt(epsilon).
        """
        if not self.p.token_dropout_rate:
            return x_BLM
        is_first_BL = is_first_in_segment(segments_BL)
        return self.token_dropout.fprop(theta.token_dropout, x_BLM, is_first_BL[..., None])

    def by_reach(self) -> dict[Reach, SelfAttention]:
        """Returns one self-attention for each reach among the layers. They share masks."""
        attentions = [layer.self_attention for layer in self.layers_in_order()]
        return {attention.reach: attention for attention in reversed(attentions)}

    def _masks(self, theta: NestedMap, segments_BL: tf.Tensor) -> tuple[AttentionMask, ...]:
        attentions = self.by_reach().values()
        masks = [attention.mask(segments_BL) for attention in attentions]
        bias = self.learned_bias(theta)
        if bias is None:
            return tuple(masks)
        length = segments_BL.shape[1]
        kernel = next(iter(attentions)).kernel
        bias = kernel.prepare_bias(bias, masks[0].distances(length, length))
        return tuple(dataclasses.replace(mask, learned_bias=bias) for mask in masks)

    def learned_bias(self, theta: NestedMap) -> RelativeBias | None:
        """Returns the relative bias that all layers share, as a table; None if there is none."""
        if "shared_relative_bias" not in self.children:
            return None
        return self.shared_relative_bias.fprop(theta.shared_relative_bias)

    def begin(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the input of the first layer, normalized if the stack has a norm there."""
        return self.input_norm.fprop(theta.input_norm, x_BLM) if self.p.has_input_norm else x_BLM

    def finish(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the output of the last layer, normalized if the stack has a norm at the end."""
        return self.final_norm.fprop(theta.final_norm, x_BLM) if self.p.has_final_norm else x_BLM

    def layer_counts(self) -> list[tuple[TransformerLayer, int]]:
        """Returns (layer, number of times that a forward pass runs it) for all layers."""
        first = self.first_layers.layer_counts() if self._sequential_first else []
        return first + self.layers.layer_counts()

    @layer_method
    def unrolled(self, theta: NestedMap) -> list[tuple[Layer, NestedMap]]:
        """Returns all layers with their weights, in the order of execution."""
        first = self.first_layers.unrolled(theta.first_layers) if self._sequential_first else []
        return first + self.layers.unrolled(theta.layers)

    def layers_in_order(self) -> list[TransformerLayer]:
        """Returns the layer that runs at each place. Those of a loop stand there repeatedly."""
        first = self.first_layers.layers_in_order() if self._sequential_first else []
        return first + self.layers.layers_in_order()
