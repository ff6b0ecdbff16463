"""Norms of queries and keys whose weights differ by head."""

from __future__ import annotations

from lingvo_gshard.core import SCALE, Layer, NestedMap, Params, initializers, layer_method, tf
from lingvo_gshard.layers import RMSNorm, layer_norm


class HeadsLayerNorm(Layer):
    """LayerNorm of queries or keys, each head on its own and with its own scale.

    Command R+ has it (https://huggingface.co/CohereLabs/c4ai-command-r-plus).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of D; set by the attention.", minimum=1)
        p.define("num_heads", 0, "Size of N; set by the attention.", minimum=1)
        p.define("epsilon", 1e-5, "Added to the variance.", above=0)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        sizes = {"N": self.p.num_heads, "D": self.p.model_dim}
        self.create_variable("scale", "ND", sizes, initializers.constant(1.0), role=SCALE)

    @layer_method
    def fprop(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        """Returns x [..., N, D] normalized over D, in x's type."""
        ones = tf.ones([self.p.model_dim])
        normalized = layer_norm(tf.cast(x, tf.float32), ones, 0.0 * ones, self.p.epsilon)
        return tf.cast(normalized * tf.cast(theta.scale, tf.float32), x.dtype)


class HeadsRMSNorm(RMSNorm):
    """RMSNorm of queries or keys over all heads together, as in OLMoE (arXiv 2409.02060)."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("num_heads", 0, "Size of N; set by the attention.", minimum=1)
        return p

    _layout = "ND"

    def _sizes(self) -> dict[str, int]:
        return {"N": self.p.num_heads, "D": self.p.model_dim}
