"""TransformerLayer: attention and a feed-forward layer with residual connections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import Layer, NestedMap, Params, UserError, layer_method, tf
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.layers.attention.mask import AttentionMask, mask_of_reach
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.norm import LayerNorm
from lingvo_gshard.sharding import annotate


def inherit(params: Params, **values: object) -> Params:
    """Returns a copy of `params` with these values for hyperparameters that are 0 or empty.

    Hyperparameters that the layer does not have are left out.
    """
    result = params.copy()
    for name, value in values.items():
        if name in result and not result.get(name):
            setattr(result, name, value)
    return result


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a decoder attends to, such as the output of an encoder.

    Attributes:
      segments_BK: int32 segment of each position, 0 in padding.
    """

    output_BKM: tf.Tensor
    segments_BK: tf.Tensor


# Places of the norms of a sublayer f:
#   before   x + f(norm(x)), the order of Wang et al. 2019, arXiv 1906.01787
#   both     x + norm(f(norm(x))), Gemma 2, arXiv 2408.00118
#   output   x + norm(f(x)), OLMo 2, arXiv 2501.00656
#   sum      norm(x + f(x)), Vaswani et al. 2017, arXiv 1706.03762
#   shared   x + f(norm(x)) + g(norm(x)), with one norm for the self-attention f and the
#            feed-forward layer g, GPT-J (https://github.com/kingoflolz/mesh-transformer-jax)
BEFORE, BOTH, OUTPUT, SUM, SHARED = NORM_POSITIONS = ("before", "both", "output", "sum", "shared")


class TransformerLayer(Layer):
    """Self-attention, optional cross-attention, and a feed-forward layer.

    Each sublayer computes x + dropout(sublayer(norm(x))), unless `norm_position` says otherwise.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("norm", LayerNorm.params(), "Params of the norms.")
        p.define(
            "norm_position",
            BEFORE,
            "Where norms are: 'before' a sublayer, at its 'output', at 'both', after the 'sum', or "
            "'shared' before all sublayers, which then read the same input.",
            choices=NORM_POSITIONS,
        )
        p.define("residual_scale", 1.0, "Factor of each sublayer's output.", above=0)
        p.define("self_attention", SelfAttention.params(), "Params of the self-attention.")
        p.define("cross_attention", CrossAttention.params(), "Params of the attention to a memory.")
        p.define("feed_forward", FeedForward.params(), "Params of the feed-forward or MoE layer.")
        p.define("has_cross_attention", False, "Whether the layer also attends to a memory.")
        p.define_fraction("residual_dropout_rate", 0.0, "Fraction of sublayers' outputs dropped.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.norm_position == SHARED and p.has_cross_attention:
            raise UserError(
                f"{path}.norm_position: {SHARED!r} with {path}.has_cross_attention; {BEFORE!r} was "
                "expected in layers with cross-attention"
            )
        self._create_sublayer("self_attention", p.self_attention)
        if p.has_cross_attention:
            self._create_sublayer("cross_attention", p.cross_attention)
        self._create_sublayer("feed_forward", p.feed_forward)

    @classmethod
    def vectorization_obstacle(cls, params: Params) -> str:
        attentions = ["self_attention", "cross_attention"][: 1 + params.has_cross_attention]
        for name in attentions:
            kernel = params.get(name).kernel.cls
            if not kernel.is_vectorizable:
                return f"{name}.kernel={kernel.__name__}; choose DenseKernel"
        return params.feed_forward.cls.vectorization_obstacle(params.feed_forward)

    def _create_sublayer(self, name: str, params: Params) -> None:
        p = self.p
        norm = inherit(p.norm, model_dim=p.model_dim)
        is_shared = p.norm_position == SHARED and name != "self_attention"
        if p.norm_position != OUTPUT and not is_shared:
            self.create_child(f"{name}_norm", norm)
        if p.norm_position in (BOTH, OUTPUT):
            self.create_child(f"{name}_output_norm", norm)
        self.create_child(name, inherit(params, model_dim=p.model_dim))
        dropout = Dropout.params().set(rate=p.residual_dropout_rate)
        self.create_child(f"{name}_dropout", dropout)

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        masks: Sequence[AttentionMask],
        memory_BKM: tf.Tensor | None = None,
        memory_mask: AttentionMask | None = None,
    ) -> tf.Tensor:
        """Returns [B,L,M].

        Args:
          masks: `self_attention.mask` of the segments of x, for each reach among the layers that
            share them.
          memory_BKM: the memory of each row, if the layer has cross-attention.
          memory_mask: `cross_attention.mask` of the segments of x and of the memory.
        """
        mask = mask_of_reach(masks, self.self_attention.reach)
        entered_BLM = self.enter("self_attention", theta, x_BLM)
        h_BLM = self.self_attention.fprop(theta.self_attention, entered_BLM, mask)
        x_BLM = self.add("self_attention", theta, x_BLM, h_BLM)
        if self.p.has_cross_attention:
            h_BLM = self.enter("cross_attention", theta, x_BLM)
            h_BLM = self.cross_attention.fprop(
                theta.cross_attention, h_BLM, memory_BKM, memory_mask
            )
            x_BLM = self.add("cross_attention", theta, x_BLM, h_BLM)
        h_BLM = self.enter_feed_forward(theta, x_BLM, entered_BLM)
        h_BLM = self.feed_forward.fprop(theta.feed_forward, h_BLM, mask.segments_BL)
        return self.observe(self.add("feed_forward", theta, x_BLM, h_BLM))

    def enter(self, name: str, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns the input of a sublayer."""
        if self.p.norm_position in (OUTPUT, SUM):
            return x
        return self._normalize(f"{name}_norm", theta, x)

    def enter_feed_forward(
        self, theta: NestedMap, x: tf.Tensor, entered_attention: tf.Tensor
    ) -> tf.Tensor:
        """Returns the input of the feed-forward layer, given what the self-attention read."""
        if self.p.norm_position == SHARED:
            return entered_attention
        return self.enter("feed_forward", theta, x)

    def add(self, name: str, theta: NestedMap, x: tf.Tensor, h: tf.Tensor) -> tf.Tensor:
        """Returns the input x of a sublayer with its output h added."""
        position = self.p.norm_position
        if position in (BOTH, OUTPUT):
            h = self._normalize(f"{name}_output_norm", theta, h)
        if self.p.residual_scale != 1.0:
            h *= tf.constant(self.p.residual_scale, h.dtype)
        x += getattr(self, f"{name}_dropout").fprop(theta[f"{name}_dropout"], h)
        return self._normalize(f"{name}_norm", theta, x) if position == SUM else x

    def _normalize(self, name: str, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        h = getattr(self, name).fprop(theta[name], x)
        # Under tensor parallelism the gradient of h is a sum of partial ones. Annotated, h has the
        # sharding of x; otherwise XLA would replicate that sum.
        return annotate(h, "BLM")
