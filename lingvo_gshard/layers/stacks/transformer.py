"""TransformerStack: Transformer layers, some of them with a mixture of experts."""

from __future__ import annotations

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.sequential import Sequential
from lingvo_gshard.layers.stacks.transformer_layer import Memory, TransformerLayer, inherit


class TransformerStack(Layer):
    """An encoder, a decoder that attends to a memory, or a causal stack, over packed rows.

    Every `moe_every`-th layer has a mixture of experts in place of its feed-forward layer. Arxiv
    2006.16668, section 2.2, has one in every other layer. The count begins after the `dense_first`
    layers, which have no experts (arXiv 2412.19437, section 4.2).

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
        p.define(
            "moe_every", 2, "Period of the layers with experts; 0: no layer has experts.", minimum=0
        )
        p.define("layer", TransformerLayer.params(), "Params of every layer.")
        p.define("moe", MixtureOfExperts.params(), "Params of the mixtures of experts.")
        p.define("has_token_ids", False, "Whether callers set `context.tokens`.")
        p.define(
            "execution",
            Sequential.params(),
            "Params of how the layers are run: Sequential, Repeat or Pipeline of layers/stacks/.",
        )
        p.define(
            "input_dropout_rate",
            0.0,
            "Fraction of the stack's input that is dropped.",
            minimum=0,
            below=1,
        )
        p.define(
            "residual_dropout_rate",
            0.0,
            "Fraction of each sublayer's output that is dropped.",
            minimum=0,
            below=1,
        )
        p.define(
            "attention_dropout_rate",
            0.0,
            "Fraction of the attention weights that is dropped.",
            minimum=0,
            below=1,
        )
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
        """Whether no position attends to a later one."""
        return self.p.is_causal or self.p.is_decoder

    def _is_moe(self, index: int) -> bool:
        """Returns whether layer `index`, counted after the dense ones, has experts."""
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
        feed_forward = inherit(feed_forward, hidden_dim=p.hidden_dim)
        layer.feed_forward = feed_forward.cls.for_stack(
            feed_forward, self.is_causal, p.has_token_ids
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
        """Returns the normalized output [B,L,M]. A position depends only on its own segment.

        Args:
          theta: weights of the stack.
          x_BLM: packed rows.
          segments_BL: int32 segment of each position, 0 in padding.
          memory: the memory that a decoder attends to.
        """
        # The attentions of all layers have the same Params, so that they can share masks.
        layer, _ = self.layer_counts()[0]
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

    def layer_counts(self) -> list[tuple[TransformerLayer, int]]:
        """Returns (layer, number of times that a forward pass runs it) for all layers."""
        first = self.first_layers.layer_counts() if self.p.dense_first else []
        return first + self.layers.layer_counts()

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
        """Returns the cache of a causal stack for decoding.

        Args:
          theta: weights of the stack.
          shape: rows B and positions L to decode.
          dtype: type of the cached keys and values.
          memory: the memory that a decoder attends to, with one segment per row.
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
        segments_B1: tf.Tensor,
        step: tf.Tensor,
        cache: NestedMap,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns ([B,1,M], cache): `fprop` of a causal stack at position `step`.

        Args:
          theta: weights of the stack.
          x_B1M: input of each row at position `step`.
          segments_B1: int32, 0 for a row that has ended.
          step: int32 scalar.
          cache: from `init_cache`, filled for the positions before `step`.
        """
        caches, memory_mask = [], None
        if "memory_bias" in cache:
            memory_mask = AttentionMask(bias_B1LK=cache.memory_bias)
        for (layer, layer_theta), layer_cache in zip(
            self.unrolled(theta), cache.layers, strict=True
        ):
            x_B1M, layer_cache = layer.extend_step(
                layer_theta, x_B1M, segments_B1, step, layer_cache, memory_mask
            )
            caches.append(layer_cache)
        x_B1M = self.final_norm.fprop(theta.final_norm, x_B1M)
        return x_B1M, NestedMap(cache, layers=caches)

    def reorder_cache(self, cache: NestedMap, rows_B: tf.Tensor) -> NestedMap:
        """Returns the cache with row i taken from row `rows_B[i]`, which has the same memory."""

        def take(x: tf.Tensor) -> tf.Tensor:
            return tf.gather(x, rows_B)

        layers = [
            NestedMap(layer, self_attention=layer.self_attention.transform(take))
            for layer in cache.layers
        ]
        return NestedMap(cache, layers=layers)
