"""SelfAttention: each position of a packed row attends to the positions of its own segment."""

from __future__ import annotations

from lingvo_gshard.core import BIAS, NestedMap, Params, UserError, initializers, layer_method, tf
from lingvo_gshard.layers.attention import relative_bias, rotary
from lingvo_gshard.layers.attention.kernel import heads_first
from lingvo_gshard.layers.attention.mask import AttentionMask
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
        rotary.define(p)
        p.define(
            "relative_buckets", 0, "Distance buckets with a learned bias; 0: no bias.", minimum=0
        )
        p.define("relative_max_distance", 128, "Smallest distance in the last bucket.", minimum=1)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.relative_buckets and not self.kernel.supports_relative_bias:
            raise UserError(
                f"{path}.relative_buckets: {p.relative_buckets} is not supported by {path}.kernel, "
                f"{type(self.kernel).__name__}; set it to 0 or choose DenseKernel"
            )
        rotary.check(p, self.head_dim, path)
        self.scaling: RotaryScaling = p.rotary_scaling.instantiate(path=f"{path}.rotary_scaling")
        relative_bias.check(p, path)

    def _create_weights(self) -> None:
        super()._create_weights()
        if self.p.relative_buckets:
            sizes = {"b": self.p.relative_buckets, "N": self.p.num_heads}
            zeros = initializers.constant(0.0)
            self.create_variable("relative_bias", "bN", sizes, zeros, role=BIAS)

    def mask(self, segments_BL: tf.Tensor | None) -> AttentionMask:
        """Returns the mask of packed rows, prepared for all layers with the same Params.

        Args:
          segments_BL: int32 segment of each token, 0 in padding; None if each row is one segment
            without padding.
        """
        return self._mask_of_rows(segments_BL)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask: AttentionMask) -> tf.Tensor:
        """Returns [B,L,M]: each position attends to the positions that the mask allows.

        Args:
          mask: `self.mask` of the segments of x. Rotary positions begin at 0 in each segment.
        """
        query_BLND, key_BLND, value_BLND, gate_BLND = self.project_row(
            theta, x_BLM, self.positions(x_BLM, mask.segments_BL)
        )
        layout = self.kernel.keys_layout
        keys_BNKD, values_BNKD = (heads_first(x, layout) for x in (key_BLND, value_BLND))
        bias = self.own_bias(theta) or mask.learned_bias
        return self._attend(
            theta, self.kernel, query_BLND, keys_BNKD, values_BNKD, mask, bias, gate_BLND
        )

    @property
    def needs_positions(self) -> bool:
        """Whether queries or keys depend on the positions of their tokens."""
        return self.p.rotary_fraction > 0

    def positions(self, x_BLM: tf.Tensor, segments_BL: tf.Tensor | None) -> TextPositions | None:
        """Returns the positions of the tokens; None if nothing depends on them."""
        if not self.needs_positions:
            return None
        return rotary.positions_of_rows(segments_BL, x_BLM.shape[1], self.scaling)

    @layer_method
    def project_row(
        self, theta: NestedMap, x_BLM: tf.Tensor, positions: TextPositions | None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """Returns queries, keys and values [B,L,N,D], and the gate of the values, if there is one.

        Queries and keys are normalized and rotated by their positions.
        """
        names = [name for names in self.joined_products() for name in names]
        found = [
            each for names in self.joined_products() for each in self._project(theta, x_BLM, *names)
        ]
        projected = dict(zip(names, found, strict=True))
        query = self._placed("query", theta, projected["w_query"], positions)
        key = self._placed("key", theta, projected["w_key"], positions)
        value = projected.get("w_value", projected["w_key"])
        return query, key, value, projected.get("w_gate")

    def _placed(
        self, name: str, theta: NestedMap, x_BLND: tf.Tensor, positions: TextPositions | None
    ) -> tf.Tensor:
        """Returns queries or keys, normalized and rotated."""
        return self._rotate(self._normalize(name, theta, x_BLND), positions)

    def _rotate(self, x_BLND: tf.Tensor, positions: TextPositions | None) -> tf.Tensor:
        p = self.p
        if not p.rotary_fraction:
            return x_BLND
        assert positions is not None
        return rotary.rotate(x_BLND, positions, p.rotary_fraction, p.rotary_base, self.scaling)

    def own_bias(self, theta: NestedMap) -> RelativeBias | None:
        """Returns this layer's learned bias, as a table; None if it has none of its own."""
        p = self.p
        if not p.relative_buckets:
            return None
        buckets = DistanceBuckets(p.relative_buckets, p.relative_max_distance, p.is_causal)
        return RelativeBias(buckets, theta.relative_bias)

    def joined_products(self) -> list[tuple[str, ...]]:
        if self.key_value_heads == self.p.num_heads:
            return [("w_query", "w_key", "w_value")]
        return [("w_query",), ("w_key", "w_value")]
