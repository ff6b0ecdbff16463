"""SelfAttention: each position of a packed row attends to the positions of its own segment."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import BIAS, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import relative_bias, rotary
from lingvo_gshard.layers.attention.kernel import heads_first
from lingvo_gshard.layers.attention.mask import AttentionMask, Reach
from lingvo_gshard.layers.attention.multi_head_attention import MultiHeadAttention
from lingvo_gshard.layers.attention.relative_bias import DistanceBuckets, RelativeBias
from lingvo_gshard.layers.attention.rotary import RotaryScaling, TextPositions

LOCAL_LETTERS = {"b": "buckets of distances"}


class SelfAttention(MultiHeadAttention):
    """Self-attention, bidirectional or causal, over packed rows or one decoding step at a time."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("is_causal", False, "Whether a position attends to no later one.")
        p.define("window", 0, "Largest distance between a query and a key; 0: no limit.", minimum=0)
        p.define(
            "chunk",
            0,
            "Positions of the chunks of a text: a position attends to those of its own chunk; 0: "
            "no chunks. With is_causal.",
            minimum=0,
        )
        p.define(
            "temperature_floor",
            0,
            "Positions n after which queries grow: times 1 + temperature_scale * "
            "log(1 + floor((position + 1) / n)) (arXiv 2501.19399); 0: never.",
            minimum=0,
        )
        p.define("temperature_scale", 0.1, "See temperature_floor.", minimum=0)
        rotary.define(p)
        p.define(
            "normalizes_rotated",
            False,
            "Whether qk_norm comes after the rotation of queries and keys, not before it.",
        )
        p.define("value_scale", 1.0, "Factor of the values.", above=0)
        p.define(
            "has_output_gate",
            False,
            "Whether the values of each head are multiplied with sigmoid of another product with "
            "the input (arXiv 2505.06708).",
        )
        p.define(
            "relative_buckets",
            0,
            "Number of distance buckets with a learned bias; 0: no bias.",
            minimum=0,
        )
        p.define(
            "relative_max_distance",
            128,
            "The smallest distance in the last bucket.",
            minimum=1,
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.relative_buckets and not self.kernel.supports_relative_bias:
            raise UserError(
                f"{path}.relative_buckets: {p.relative_buckets} is not supported by {path}.kernel, "
                f"{type(self.kernel).__name__}; set it to 0 or choose DenseKernel"
            )
        if p.chunk and (p.temperature_floor or not p.is_causal):
            raise UserError(
                f"{path}.chunk: {p.chunk} with {path}.temperature_floor={p.temperature_floor} and "
                f"is_causal={p.is_causal}; 0 and True were expected"
            )
        rotary.check(p, self.head_dim, path)
        self.scaling: RotaryScaling = p.rotary_scaling.instantiate(path=f"{path}.rotary_scaling")
        relative_bias.check(p, path)

    def _create_weights(self) -> None:
        super()._create_weights()
        if self.p.has_output_gate:
            self._create_gate()
        if self.p.relative_buckets:
            sizes = {"b": self.p.relative_buckets, "N": self.p.num_heads}
            zeros = initializers.constant(0.0)
            self.create_variable("relative_bias", "bN", sizes, zeros, role=BIAS)

    def _create_gate(self) -> None:
        p = self.p
        sizes = {"M": p.model_dim, "N": p.num_heads, "D": self.value_dim}
        init = initializers.glorot_uniform(p.model_dim, p.num_heads * self.value_dim)
        self.create_variable("w_gate", "MND", sizes, init, inputs="M")
        if p.use_bias:
            self.create_variable("b_gate", "ND", sizes, initializers.constant(0.0), role=BIAS)

    def mask(self, segments_BL: tf.Tensor | None) -> AttentionMask:
        """Returns the mask of packed rows, prepared for all layers with the same Params.

        Args:
          segments_BL: int32 segment of each token, 0 in padding; None if each row is one segment
            without padding.
        """
        chunk = self.p.chunk
        if not chunk:
            return self._mask_of_rows(segments_BL)
        assert segments_BL is not None, f"{self.path}: chunks of rows need segments"
        # Rotations count positions from the start of a chunk: only their differences matter.
        mask = self._mask_of_rows(rotary.chunks_of(segments_BL, chunk))
        return dataclasses.replace(mask, chunk=chunk)

    @property
    def reach(self) -> Reach:
        """The part of a text that a position attends to."""
        return Reach(self.p.window, self.p.chunk)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask: AttentionMask) -> tf.Tensor:
        """Returns [B,L,M]: each position attends to the positions that the mask allows.

        Args:
          theta: weights of this layer.
          x_BLM: input rows.
          mask: `self.mask` of the segments of x. Rotary positions begin at 0 in each segment.
        """
        query_BLND, key_BLND, value_BLND, gate_BLND = self.project_row(
            theta, x_BLM, self._positions(x_BLM, mask.segments_BL)
        )
        layout = self.kernel.keys_layout
        keys_BNKD, values_BNKD = (heads_first(x, layout) for x in (key_BLND, value_BLND))
        bias = self.own_bias(theta) or mask.learned_bias
        return self._attend(
            theta, self.kernel, query_BLND, keys_BNKD, values_BNKD, mask, bias, gate_BLND
        )

    def _positions(self, x_BLM: tf.Tensor, segments_BL: tf.Tensor | None) -> TextPositions | None:
        """Returns the positions for the rotations; None if there are none."""
        if not self.p.rotary_fraction and not self.p.temperature_floor:
            return None
        return rotary.positions_of_rows(segments_BL, x_BLM.shape[1], self.scaling)

    @layer_method
    def project_row(
        self, theta: NestedMap, x_BLM: tf.Tensor, positions: TextPositions | None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Returns queries, keys and values [B,L,N,D], rotated by their positions, and the gate."""
        p = self.p
        names = [name for names in self.joined_products() for name in names]
        found = [
            each for names in self.joined_products() for each in self._project(theta, x_BLM, *names)
        ]
        projected = dict(zip(names, found, strict=True))
        query, key, value = (projected[f"w_{name}"] for name in ("query", "key", "value"))
        if p.value_scale != 1.0:
            value *= tf.constant(p.value_scale, value.dtype)
        if not p.normalizes_rotated:
            query, key = self._normalize_both(theta, query, key)
        if p.rotary_fraction:
            query, key = (self._rotate(x_BLND, positions) for x_BLND in (query, key))
        if p.normalizes_rotated:
            query, key = self._normalize_both(theta, query, key)
        return self._warmed(query, positions), key, value, projected.get("w_gate")

    def _warmed(self, query_BLND: tf.Tensor, positions: TextPositions | None) -> tf.Tensor:
        """Returns the queries, larger at later positions if Params say so."""
        p = self.p
        if not p.temperature_floor:
            return query_BLND
        assert positions is not None
        count_BL = (positions.index_BL + 1) // p.temperature_floor
        factor_BL = 1.0 + p.temperature_scale * tf.math.log1p(tf.cast(count_BL, tf.float32))
        warmed_BLND = tf.cast(query_BLND, tf.float32) * factor_BL[:, :, None, None]
        return tf.cast(warmed_BLND, query_BLND.dtype)

    def _normalize_both(
        self, theta: NestedMap, query: tf.Tensor, key: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return self._normalize("query", theta, query), self._normalize("key", theta, key)

    def _rotate(self, x_BLND: tf.Tensor, positions: TextPositions) -> tf.Tensor:
        p = self.p
        return rotary.rotate(
            x_BLND, positions, p.rotary_fraction, p.rotary_base, p.rotary_pairs, self.scaling
        )

    def own_bias(self, theta: NestedMap) -> RelativeBias | None:
        """Returns this layer's learned bias, as a table; None if it has none of its own."""
        p = self.p
        if not p.relative_buckets:
            return None
        buckets = DistanceBuckets(p.relative_buckets, p.relative_max_distance, p.is_causal)
        return RelativeBias(buckets, theta.relative_bias)

    def joined_products(self) -> list[tuple[str, ...]]:
        query = ("w_query", "w_gate") if self.p.has_output_gate else ("w_query",)
        if self.key_value_heads == self.p.num_heads:
            return [(*query, "w_key", "w_value")]
        return [query, ("w_key", "w_value")]
