"""TransformerLayer: attention and a feed-forward layer with residual connections."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.norm import LayerNorm
from lingvo_gshard.sharding import annotate


def inherit(params: Params, **values: object) -> Params:
    """Returns a copy of `params` with these values for hyperparameters that are 0 or empty."""
    result = params.copy()
    for name, value in values.items():
        if not result.get(name):
            setattr(result, name, value)
    return result


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a decoder attends to, such as the output of an encoder.

    Attributes:
      output_BKM: the memory.
      segments_BK: int32 segment of each position, 0 in padding.
    """

    output_BKM: tf.Tensor
    segments_BK: tf.Tensor


class TransformerLayer(Layer):
    """Self-attention, optional cross-attention, and a feed-forward layer.

    Each sublayer computes x + dropout(sublayer(norm(x))), the order of Wang et al. 2019, arXiv
    1906.01787.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("norm", LayerNorm.params(), "Params of the norms.")
        p.define("self_attention", SelfAttention.params(), "Params of the self-attention.")
        p.define("cross_attention", CrossAttention.params(), "Params of the attention to a memory.")
        p.define("feed_forward", FeedForward.params(), "Params of the feed-forward or MoE layer.")
        p.define("has_cross_attention", False, "Whether the layer also attends to a memory.")
        p.define(
            "residual_dropout_rate",
            0.0,
            "Fraction of each sublayer's output that is dropped.",
            minimum=0,
            below=1,
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self._create_sublayer("self_attention", p.self_attention)
        if p.has_cross_attention:
            self._create_sublayer("cross_attention", p.cross_attention)
        self._create_sublayer("feed_forward", p.feed_forward)

    @classmethod
    def vectorization_obstacle(cls, params: Params) -> str:
        """Returns the option that prevents computing several stages as one operation, or ''."""
        attentions = ["self_attention", "cross_attention"][: 1 + params.has_cross_attention]
        for name in attentions:
            kernel = params.get(name).kernel.cls
            if not kernel.is_vectorizable:
                return f"{name}.kernel={kernel.__name__}; choose DenseKernel"
        return params.feed_forward.cls.vectorization_obstacle(params.feed_forward)

    def _create_sublayer(self, name: str, params: Params) -> None:
        p = self.p
        self.create_child(f"{name}_norm", inherit(p.norm, model_dim=p.model_dim))
        self.create_child(name, inherit(params, model_dim=p.model_dim))
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
        """Returns the cache of a causal layer for decoding.

        Args:
          theta: weights of this layer.
          shape: rows B and positions L to decode.
          dtype: type of the cached keys and values.
          memory: the memory, if the layer has cross-attention. Its keys and values are projected.
        """
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
        segments_B1: tf.Tensor,
        step: tf.Tensor,
        cache: NestedMap,
        memory_mask: AttentionMask | None,
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns ([B,1,M], cache): `fprop` of a causal layer at position `step`.

        Args:
          theta: weights of this layer.
          x_B1M: input of each row at position `step`.
          segments_B1: int32, 0 for a row that has ended.
          step: int32 scalar.
          cache: from `init_cache`, filled for the positions before `step`.
          memory_mask: mask of the memory, if the layer has cross-attention.
        """
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
        return self._feed_forward(theta, x_B1M, segments_B1), cache

    @layer_method
    def _feed_forward(
        self, theta: NestedMap, x_BLM: tf.Tensor, segments_BL: tf.Tensor
    ) -> tf.Tensor:
        h_BLM = self._normalize("feed_forward", theta, x_BLM)
        h_BLM = self.feed_forward.fprop(theta.feed_forward, h_BLM, segments_BL)
        return self.observe(self._add("feed_forward", theta, x_BLM, h_BLM))

    def _normalize(self, name: str, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        h = self.children[f"{name}_norm"].fprop(theta[f"{name}_norm"], x)
        # Under tensor parallelism the gradient of h is a sum of partial ones. Annotated, h has the
        # sharding of x; otherwise XLA would replicate that sum.
        return annotate(h, "BLM")

    def _add(self, name: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        return x + self.children[f"{name}_dropout"].fprop(theta[f"{name}_dropout"], h)
