"""The position-wise feed-forward layer."""

from __future__ import annotations

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import activations
from lingvo_gshard.layers.bias import add_bias
from lingvo_gshard.layers.lora import product
from lingvo_gshard.layers.products import store


class FeedForward(Layer):
    """activation(x w_in + b_in) w_out + b_out. Vaswani et al. 2017, arXiv 1706.03762, 3.3.

    The result of a gated activation, such as swiglu, is multiplied by x w_factor + b_factor.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("hidden_dim", 0, "Size of H.", minimum=1)
        activations.define(p)
        p.define("use_bias", True, "Whether the products add a bias.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        sizes = {"M": p.model_dim, "H": p.hidden_dim}
        self.activation = activations.of(p, path)
        inputs = ("in", "factor") if self.activation.is_gated else ("in",)
        for name in inputs:
            init = initializers.fan_in(p.model_dim)
            self.create_variable(f"w_{name}", "MH", sizes, init, inputs="M")
        init = initializers.fan_in(p.hidden_dim)
        self.create_variable("w_out", "HM", sizes, init, inputs="H")
        if p.use_bias:
            for name in inputs:
                self.create_variable(f"b_{name}", "H", sizes, initializers.constant(0.0))
            self.create_variable("b_out", "M", sizes, initializers.constant(0.0))

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M] in the type of x.

        Args:
          theta: weights of this layer.
          x_BLM: input.
          mask_BL: 0 in padding. It is ignored: padding is computed like any token.
        """
        del mask_BL
        h_BLH = self._project_in(theta, "in", x_BLM)
        factor_BLH = self._project_in(theta, "factor", x_BLM) if self.activation.is_gated else None
        h_BLH = self.activation(h_BLH, factor_BLH)
        y_BLM = product(self, theta, "w_out", "BLH,HM->BLM", h_BLH)
        if self.p.use_bias:
            y_BLM = add_bias(y_BLM, tf.cast(theta.b_out, y_BLM.dtype))
        return self.observe(y_BLM)

    @layer_method
    def decoding_weights(self, theta: NestedMap) -> NestedMap:
        """Returns the weights as `infer` reads them."""
        weights = NestedMap(theta)
        for name in ("in", "factor") if self.activation.is_gated else ("in",):
            weights[f"w_{name}"] = store(theta[f"w_{name}"], "MH", "M")
        weights.w_out = store(theta.w_out, "HM", "H")
        return weights

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of the two products, or three if the activation is gated."""
        products = 3 if self.activation.is_gated else 2
        return 2 * products * shape.tokens * self.p.model_dim * self.p.hidden_dim

    @layer_method
    def _project_in(self, theta: NestedMap, name: str, x_BLM: tf.Tensor) -> tf.Tensor:
        h_BLH = product(self, theta, f"w_{name}", "BLM,MH->BLH", x_BLM)
        if not self.p.use_bias:
            return h_BLH
        return add_bias(h_BLH, tf.cast(theta[f"b_{name}"], h_BLH.dtype))
