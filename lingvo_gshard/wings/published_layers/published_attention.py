"""PublishedAttention: self-attention with options that only published models have."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import (
    BIAS,
    NestedMap,
    Params,
    TokenShape,
    UserError,
    initializers,
    layer_method,
    tf,
)
from lingvo_gshard.layers import AttentionMask, Reach, RMSNorm, SelfAttention, rotary
from lingvo_gshard.wings.facts.flops import flops, self_attention_flops
from lingvo_gshard.wings.inference.layers.cached import chunks_of
from lingvo_gshard.wings.published_layers import rotary_pairs, warm_queries


class PublishedAttention(SelfAttention):
    """Self-attention with chunks, gates, and other rotations, norms and scales.

    With the defaults of its own options it computes what SelfAttention does.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        rotary_pairs.define(p)
        p.define("value_dim", 0, "Size of D of values; 0 for head_dim.", minimum=0)
        p.define(
            "chunk",
            0,
            "Positions of the chunks of a text: a position attends to those of its own chunk; 0: "
            "no chunks. With is_causal.",
            minimum=0,
        )
        warm_queries.define(p)
        p.define(
            "normalizes_rotated", False, "Whether qk_norm comes after rotations, not before them."
        )
        p.define("value_scale", 1.0, "Factor of the values.", above=0)
        p.define(
            "has_output_gate",
            False,
            "Whether the values of each head are multiplied with sigmoid of another product with "
            "the input (arXiv 2505.06708).",
        )
        p.define("normalizes_values", False, "Whether values are normalized, without a scale.")
        p.define(
            "has_value_weight",
            True,
            "Whether values have a product of their own. Otherwise they are the keys, before their "
            "norm and rotation.",
        )
        return p

    @classmethod
    def of(cls, attention: Params) -> Params:
        """Returns Params that compute what a SelfAttention's do. Other Params are returned."""
        if attention.cls is not SelfAttention:
            return attention
        return cls.params().set(**dict(attention.items()))

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.chunk and (p.temperature_floor or not p.is_causal):
            raise UserError(
                f"{path}.chunk: {p.chunk} with {path}.temperature_floor={p.temperature_floor} and "
                f"is_causal={p.is_causal}; 0 and True were expected"
            )
        if not p.has_value_weight and self.value_dim != self.head_dim:
            raise UserError(
                f"{path}.value_dim: {p.value_dim} with {path}.has_value_weight=False; "
                f"{path}.head_dim, {self.head_dim}, was expected"
            )

    def _create_weights(self) -> None:
        p = self.p
        self.value_dim = p.value_dim or self.head_dim
        super()._create_weights()
        if p.normalizes_values:
            norm = RMSNorm.params().set(epsilon=p.query_key_norm.epsilon, has_scale=False)
            self.create_child("value_norm", norm.set(model_dim=self.value_dim))
        for name in () if p.has_value_weight else ("w_value", "b_value"):
            self._variables.pop(name, None)
        if not p.has_output_gate:
            return
        sizes = {"M": p.model_dim, "N": p.num_heads, "D": self.value_dim}
        init = initializers.glorot_uniform(p.model_dim, p.num_heads * self.value_dim)
        self.create_variable("w_gate", "MND", sizes, init, inputs="M")
        if p.use_bias:
            self.create_variable("b_gate", "ND", sizes, initializers.constant(0.0), role=BIAS)

    def joined_products(self) -> list[tuple[str, ...]]:
        first, *rest = super().joined_products()
        gate = ("w_gate",) if self.p.has_output_gate else ()
        products = [(first[0], *gate, *first[1:]), *rest]
        if self.p.has_value_weight:
            return products
        return [tuple(name for name in names if name != "w_value") for names in products]

    def mask(self, segments_BL: tf.Tensor | None) -> AttentionMask:
        """Returns the mask of packed rows, as `SelfAttention.mask` does; chunks need segments."""
        chunk = self.p.chunk
        if not chunk:
            return super().mask(segments_BL)
        assert segments_BL is not None, f"{self.path}: chunks of rows need segments"
        # Rotations count positions from the start of a chunk: only their differences matter.
        mask = super().mask(chunks_of(segments_BL, chunk))
        # A row has more chunks than texts.
        return dataclasses.replace(mask, chunk=chunk, most_segments=0)

    @property
    def reach(self) -> Reach:
        return Reach(self.p.window, self.p.chunk)

    @property
    def needs_positions(self) -> bool:
        return super().needs_positions or self.p.temperature_floor > 0

    @layer_method
    def project_row(
        self, theta: NestedMap, x_BLM: tf.Tensor, positions: rotary.TextPositions | None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Returns queries, keys, values and the gate; see the base class."""
        query_BLND, key_BLND, value_BLND, gate_BLND = super().project_row(theta, x_BLM, positions)
        if self.p.normalizes_values:
            value_BLND = self.value_norm.fprop(theta.value_norm, value_BLND)
        if self.p.value_scale != 1.0:
            value_BLND *= tf.constant(self.p.value_scale, value_BLND.dtype)
        return warm_queries.warm(query_BLND, positions, self.p), key_BLND, value_BLND, gate_BLND

    def _placed(
        self, name: str, theta: NestedMap, x_BLND: tf.Tensor, positions: rotary.TextPositions | None
    ) -> tf.Tensor:
        if self.p.normalizes_rotated:
            return self._normalize(name, theta, self._rotate(x_BLND, positions))
        return super()._placed(name, theta, x_BLND, positions)

    def _rotate(self, x_BLND: tf.Tensor, positions: rotary.TextPositions | None) -> tf.Tensor:
        if not self.p.rotary_fraction:
            return x_BLND
        assert positions is not None
        return rotary_pairs.rotate(x_BLND, positions, self.p.rotary_fraction, self.p, self.scaling)


@flops.register(PublishedAttention)
def published_flops(layer: PublishedAttention, shape: TokenShape) -> int:
    """Returns the operations of a self-attention with all of its options."""
    p, per_head = layer.p, 2 * shape.tokens * layer.p.model_dim * layer.value_dim
    more = p.num_heads * p.has_output_gate - layer.key_value_heads * (not p.has_value_weight)
    return self_attention_flops(layer, shape) + per_head * more
