"""A relative position bias that all layers of a stack share."""

from __future__ import annotations

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import BIAS, Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.positions import relative_bias

LOCAL_LETTERS = {"b": "buckets of distances"}


class SharedRelativeBias(Layer):
    """One learned bias for each head and bucket of distances. T5, arXiv 1910.10683, section 2.1."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("buckets", 0, "Number of distance buckets; 0: no bias.", minimum=0)
        p.define("max_distance", 128, "The smallest distance in the last bucket.", minimum=1)
        p.define("num_heads", 0, "Size of N; set by the stack.", minimum=1)
        p.define("is_causal", False, "Whether all keys are earlier; set by the stack.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        relative_bias.check_buckets(
            p.buckets, p.max_distance, p.is_causal, f"{path}.buckets", f"{path}.max_distance"
        )
        sizes = {"b": p.buckets, "N": p.num_heads}
        self.create_variable("table", "bN", sizes, initializers.constant(0.0), role=BIAS)

    @layer_method
    def fprop(self, theta: NestedMap, distances_LK: tf.Tensor) -> tf.Tensor:
        """Returns the float32 bias [N,L,K].

        Args:
          theta: weights of this layer.
          distances_LK: int32, position of each key minus position of each query.
        """
        p = self.p
        buckets_LK = relative_bias.bucket_of(distances_LK, p.buckets, p.max_distance, p.is_causal)
        return relative_bias.bias_of(theta.table, buckets_LK)
