"""Transformer layers and stacks of them, with a mixture of experts in every n-th layer."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.norm import LayerNorm
from lingvo_gshard.layers.stacks.sequential import Sequential
from lingvo_gshard.sharding import annotate


def inherit(params: Params, **values: object) -> Params:
    """Returns a copy in which hyperparameters named here have this value where unset (0 or '')."""
    result = params.copy()
    for name, value in values.items():
        if not result.get(name):
            setattr(result, name, value)
    return result


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a decoder attends to: the encoder's output [B,K,M] and its segments [B,K]."""

    output_BKM: tf.Tensor
    segments_BK: tf.Tensor


class TransformerLayer(Layer):
    """Self-attention, cross-attention if asked for, and feed-forward, each normalized on its input.

    x + dropout(sublayer(norm(x))): the order of Wang et al. 2019, arXiv 1906.01787.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("norm", LayerNorm.params(), "Params of the norms.")
        p.define("self_attention", SelfAttention.params(), "Params of the self-attention.")
        p.define("cross_attention", CrossAttention.params(), "Params of the attention to a memory.")
        p.define("feed_forward", FeedForward.params(), "Params of the feed-forward or MoE layer.")
        p.define("has_cross_attention", False, "Whether the layer attends to a memory as well.")
        p.define("residual_dropout_rate", 0.0, "Share of each sublayer's output dropped.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self._sublayer("self_attention", inherit(p.self_attention, model_dim=p.model_dim))
        if p.has_cross_attention:
            self._sublayer("cross_attention", inherit(p.cross_attention, model_dim=p.model_dim))
        self._sublayer("feed_forward", inherit(p.feed_forward, model_dim=p.model_dim))

    @classmethod
    def vectorization_obstacle(cls, params: Params) -> str:
        """Returns the option that keeps layers from being computed as one operation, or ''."""
        attentions = ["self_attention", "cross_attention"][: 1 + params.has_cross_attention]
        for name in attentions:
            kernel = params.get(name).kernel.cls
            if not kernel.is_vectorizable:
                return f"{name}.kernel={kernel.__name__}; choose DenseKernel"
        return params.feed_forward.cls.vectorization_obstacle(params.feed_forward)

    def _sublayer(self, name: str, params: Params) -> None:
        p = self.p
        self.create_child(f"{name}_norm", inherit(p.norm, model_dim=p.model_dim))
        self.create_child(name, params)
        dropout = Dropout.params().set(rate=p.residual_dropout_rate)
        self.create_child(f"{name}_dropout", dropout)

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        mask: AttentionMask,
        memory_BKM: tf.Tensor | None = None,
        memory_mask: AttentionMask | None = None,
    ) -> tf.Tensor:
        """Returns [B,L,M].

        Args:
          theta: weights of this layer.
          x_BLM: packed rows.
          mask: `self_attention.mask` of the segments of x.
          memory_BKM: the memory of each row, if the layer has cross-attention.
          memory_mask: `cross_attention.mask` of the segments of x and of the memory.
        """
        h_BLM = self._normalize("self_attention", theta, x_BLM)
        h_BLM = self.self_attention.fprop(theta.self_attention, h_BLM, mask)
        x_BLM = self._add("self_attention", theta, x_BLM, h_BLM)
        if self.p.has_cross_attention:
            h_BLM = self._normalize("cross_attention", theta, x_BLM)
            h_BLM = self.cross_attention.fprop(
                theta.cross_attention, h_BLM, memory_BKM, memory_mask
            )
            x_BLM = self._add("cross_attention", theta, x_BLM, h_BLM)
        return self._feed_forward(theta, x_BLM, mask.segments_BL)

    @layer_method
    def init_cache(
        self, theta: NestedMap, shape: tuple[int, int], dtype: tf.DType, memory: Memory | None
    ) -> NestedMap:
        """Returns a causal layer's cache for steps of `shape` (B, L), with any memory projected."""
        cache = NestedMap(self_attention=self.self_attention.init_cache(*shape, dtype))
        if memory is not None:
            cache.memory = self.cross_attention.cache_memory(
                theta.cross_attention, memory.output_BKM
            )
        return cache

    @layer_method
    def extend_step(
        self,
        theta: NestedMap,
        x_B1M: tf.Tensor,
        mask_B1: tf.Tensor,
        step: tf.Tensor,
        cache: NestedMap,
        memory_mask: AttentionMask | None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns ([B,1,M], cache): `fprop` at position `step` of a causal layer."""
        h_B1M = self._normalize("self_attention", theta, x_B1M)
        h_B1M, self_cache = self.self_attention.extend_step(
            theta.self_attention, h_B1M, step, cache.self_attention
        )
        x_B1M = self._add("self_attention", theta, x_B1M, h_B1M)
        if self.p.has_cross_attention:
            h_B1M = self._normalize("cross_attention", theta, x_B1M)
            h_B1M = self.cross_attention.attend_to_cache(
                theta.cross_attention, h_B1M, cache.memory, memory_mask
            )
            x_B1M = self._add("cross_attention", theta, x_B1M, h_B1M)
        cache = NestedMap(cache, self_attention=self_cache)
        return self._feed_forward(theta, x_B1M, mask_B1), cache

    @layer_method
    def _feed_forward(self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
        h_BLM = self._normalize("feed_forward", theta, x_BLM)
        h_BLM = self.feed_forward.fprop(theta.feed_forward, h_BLM, mask_BL)
        return self.observe(self._add("feed_forward", theta, x_BLM, h_BLM))

    def _normalize(self, name: str, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        h = self.children[f"{name}_norm"].fprop(theta[f"{name}_norm"], x)
        # Or its gradient, a sum of partial ones under tensor parallelism, would be made whole.
        return annotate(h, "BLM")

    def _add(self, name: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        return x + self.children[f"{name}_dropout"].fprop(theta[f"{name}_dropout"], h)


class TransformerStack(Layer):
    """An encoder, a decoder with a memory, or a causal stack with none, over packed rows.

    Every `moe_every`-th layer has a mixture of experts in place of its feed-forward layer, as in
    arXiv 2006.16668, section 2.2, where it is every other one. With `dense_first` layers before
    them (arXiv 2412.19437, section 4.2), these are counted from the layer after those.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("num_layers", 0, "How many layers.")
        p.define("model_dim", 0, "Size of M.")
        p.define("num_heads", 0, "Size of N.")
        p.define("hidden_dim", 0, "Size of H, in feed-forward layers and in experts.")
        p.define("is_causal", False, "Whether no position sees a later one; a decoder's never do.")
        p.define("is_decoder", False, "Whether it is causal and attends to a memory.")
        p.define("dense_first", 0, "The first so many layers have no experts.")
        p.define("moe_every", 2, "Layers moe_every, 2 * moe_every, ... have experts; 0: none has.")
        p.define("layer", TransformerLayer.params(), "Params of every layer.")
        p.define("moe", MixtureOfExperts.params(), "Params of the mixtures of experts.")
        p.define("has_token_ids", False, "Whether callers say, by context.tokens, which they are.")
        p.define(
            "execution",
            Sequential.params(),
            "Params of how the layers are run: Sequential, Repeat or Pipeline of layers/stacks/.",
        )
        p.define("input_dropout_rate", 0.0, "Share of the stack's input dropped in training.")
        p.define("residual_dropout_rate", 0.0, "Share of each sublayer's output dropped.")
        p.define("attention_dropout_rate", 0.0, "Share of attention weights dropped.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self.create_child("input_dropout", Dropout.params().set(rate=p.input_dropout_rate))
        if not 0 <= p.dense_first <= p.num_layers:
            raise ValueError(
                f"{path}.dense_first: {p.dense_first} is not in 0 to {path}.num_layers, "
                f"{p.num_layers}"
            )
        path = f"{path}.execution"
        remat_policy.check(p.execution.rematerialize, f"{path}.rematerialize")
        if p.dense_first:
            first = [self._layer_params(has_experts=False) for _ in range(p.dense_first)]
            execution = Sequential.params().set(rematerialize=p.execution.rematerialize)
            self.create_child("first_layers", Sequential.for_layers(execution, first, 1, path))
        layers = [self._layer_params(self._is_moe(i)) for i in range(p.num_layers - p.dense_first)]
        period = max(p.moe_every, 1)
        execution = p.execution.cls.for_layers(p.execution, layers, period, path)
        self.create_child("layers", execution)
        self.create_child("final_norm", inherit(p.layer.norm, model_dim=p.model_dim))

    @property
    def is_causal(self) -> bool:
        """Whether no position sees a later one."""
        return self.p.is_causal or self.p.is_decoder

    def _is_moe(self, index: int) -> bool:
        """Whether layer `index` behind the first, dense ones has experts."""
        return bool(self.p.moe_every) and (index + 1) % self.p.moe_every == 0

    def _layer_params(self, has_experts: bool) -> Params:
        p = self.p
        layer = inherit(
            p.layer, model_dim=p.model_dim, residual_dropout_rate=p.residual_dropout_rate
        )
        for name in ("self_attention", "cross_attention"):
            attention = inherit(
                layer.get(name), num_heads=p.num_heads, dropout_rate=p.attention_dropout_rate
            )
            setattr(layer, name, attention)
        layer.self_attention.is_causal = self.is_causal
        feed_forward = p.moe if has_experts else layer.feed_forward
        layer.feed_forward = inherit(feed_forward, hidden_dim=p.hidden_dim)
        layer.feed_forward = layer.feed_forward.cls.for_stack(
            layer.feed_forward, self.is_causal, p.has_token_ids
        )
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
        """Returns [B,L,M], normalized; a position sees its own segment only."""
        # All layers have attentions of the same Params, and so share their masks.
        layer, _ = self.layers_by_times()[0]
        shared = [layer.self_attention.mask(segments_BL)]
        if self.p.is_decoder:
            memory_mask = layer.cross_attention.mask(segments_BL, memory.segments_BK)
            shared += [memory.output_BKM, memory_mask]
        x_BLM = self.input_dropout.fprop(theta.input_dropout, x_BLM)
        if self.p.dense_first:
            x_BLM = self.first_layers.fprop(theta.first_layers, x_BLM, *shared)
        self.layers.check_batch(x_BLM.shape[0], f"{self.path}.execution")
        x_BLM = self.layers.fprop(theta.layers, x_BLM, *shared)
        return self.observe(self.final_norm.fprop(theta.final_norm, x_BLM))

    def layers_by_times(self) -> list[tuple[TransformerLayer, int]]:
        """Returns the layers, each with the number of times that a forward pass runs it."""
        first = self.first_layers.layers_by_times() if self.p.dense_first else []
        return first + self.layers.layers_by_times()

    @layer_method
    def unrolled(self, theta: NestedMap) -> list[tuple[Layer, NestedMap]]:
        """Returns all layers with their weights, in the order in which they run."""
        first = self.first_layers.unrolled(theta.first_layers) if self.p.dense_first else []
        return first + self.layers.unrolled(theta.layers)

    @layer_method
    def init_cache(
        self,
        theta: NestedMap,
        shape: tuple[int, int],
        dtype: tf.DType,
        memory: Memory | None = None,
    ) -> NestedMap:
        """Returns the cache for decoding `shape` (B, L): B rows of up to L positions.

        memory: of one segment a row; None where the layers attend to none.
        """
        cache = NestedMap(
            layers=[
                layer.init_cache(layer_theta, shape, dtype, memory)
                for layer, layer_theta in self.unrolled(theta)
            ]
        )
        if memory is not None:
            mask = AttentionMask(tf.ones_like(memory.segments_BK[:, :1]), memory.segments_BK)
            cache.memory_bias = mask.with_bias().bias_B1LK
        return cache

    @layer_method
    def extend_step(
        self,
        theta: NestedMap,
        x_B1M: tf.Tensor,
        mask_B1: tf.Tensor,
        step: tf.Tensor,
        cache: NestedMap,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns ([B,1,M], cache): `fprop` at position `step`."""
        caches, memory_mask = [], None
        if "memory_bias" in cache:
            memory_mask = AttentionMask(bias_B1LK=cache.memory_bias)
        for (layer, layer_theta), layer_cache in zip(
            self.unrolled(theta), cache.layers, strict=True
        ):
            x_B1M, layer_cache = layer.extend_step(
                layer_theta, x_B1M, mask_B1, step, layer_cache, memory_mask
            )
            caches.append(layer_cache)
        x_B1M = self.final_norm.fprop(theta.final_norm, x_B1M)
        return x_B1M, NestedMap(cache, layers=caches)

    def reorder_cache(self, cache: NestedMap, rows_B: tf.Tensor) -> NestedMap:
        """Returns the cache with row i taken from row rows[i] of the same memory."""

        def take(x: tf.Tensor) -> tf.Tensor:
            return tf.gather(x, rows_B)

        layers = [
            NestedMap(layer, self_attention=layer.self_attention.transform(take))
            for layer in cache.layers
        ]
        return NestedMap(cache, layers=layers)
