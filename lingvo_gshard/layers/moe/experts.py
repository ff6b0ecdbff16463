"""Experts: E feed-forward networks with stacked weights."""

from __future__ import annotations

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import activations
from lingvo_gshard.layers.bias import add_bias
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.lora import product
from lingvo_gshard.layers.products import store


class Experts(Layer):
    """Computes activation(x w_in + b_in) w_out + b_out with separate weights for each expert.

    A gated activation such as swiglu is multiplied by x w_factor + b_factor. `dropout_rate` is
    expert dropout (Fedus et al. 2021, arXiv 2101.03961, section 2.4).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("hidden_dim", 0, "Size of H.", minimum=1)
        p.define("num_experts", 0, "Size of E.", minimum=1)
        activations.define(p)
        p.define("use_bias", False, "Whether to add biases to the products.")
        p.define(
            "dropout_rate",
            0.0,
            "Share of the hidden activations dropped in training.",
            minimum=0,
            below=1,
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self.activation = activations.of(p, path)
        sizes = {"E": p.num_experts, "M": p.model_dim, "H": p.hidden_dim}
        for name in self._input_products:
            init = initializers.fan_in(p.model_dim)
            self.create_variable(f"w_{name}", "EMH", sizes, init, inputs="M")
        init = initializers.fan_in(p.hidden_dim)
        self.create_variable("w_out", "EHM", sizes, init, inputs="H")
        if p.use_bias:
            for name in self._input_products:
                self.create_variable(f"b_{name}", "EH", sizes, initializers.constant(0.0))
            self.create_variable("b_out", "EM", sizes, initializers.constant(0.0))
        self.create_child("dropout", Dropout.params().set(rate=p.dropout_rate))

    @property
    def _input_products(self) -> tuple[str, ...]:
        """Returns the names of the products with the input."""
        return ("in", "factor") if self.activation.is_gated else ("in",)

    @layer_method
    def fprop(self, theta: NestedMap, x_EGCM: tf.Tensor) -> tf.Tensor:
        """Returns [E,G,C,M]: each expert's output for the rows in its buffers, in x's dtype."""
        return self._compute(theta, x_EGCM, "EGCM,EMH->EGCH", "EGCH,EHM->EGCM")

    @layer_method
    def compute_one(self, theta: NestedMap, x_CM: tf.Tensor) -> tf.Tensor:
        """Returns one expert's outputs [C,M] for its rows.

        Args:
          theta: the weights of that expert, without the dimension E; maybe `decoding_weights`.
          x_CM: the rows.
        """
        return self._compute(theta, x_CM, "CM,MH->CH", "CH,HM->CM")

    @layer_method
    def decoding_weights(self, theta: NestedMap, is_one: bool = False) -> NestedMap:
        """Returns the weights for inference.

        Args:
          theta: the weights.
          is_one: whether they are those of one expert, without the dimension E.
        """
        first = "" if is_one else "E"
        weights = NestedMap(theta, w_out=store(theta.w_out, f"{first}HM", "H"))
        for name in self._input_products:
            weights[f"w_{name}"] = store(theta[f"w_{name}"], f"{first}MH", "M")
        return weights

    @layer_method
    def _compute(
        self, theta: NestedMap, x: tf.Tensor, input_equation: str, output_equation: str
    ) -> tf.Tensor:
        def hidden(name: str) -> tf.Tensor:
            h = product(self, theta, f"w_{name}", input_equation, x)
            return add_bias(h, _broadcast(theta[f"b_{name}"], h)) if self.p.use_bias else h

        factor = hidden("factor") if self.activation.is_gated else None
        h = self.dropout.fprop(theta.dropout, self.activation(hidden("in"), factor))
        y = product(self, theta, "w_out", output_equation, h)
        return add_bias(y, _broadcast(theta.b_out, y)) if self.p.use_bias else y

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of one forward pass in which one expert computes each token."""
        products = len(self._input_products) + 1
        return 2 * products * shape.tokens * self.p.model_dim * self.p.hidden_dim


def _broadcast(bias: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the bias in the type of the rows, shaped to broadcast over those of its expert."""
    shape = bias.shape.as_list()
    between = [1] * (rows.shape.rank - bias.shape.rank)
    return tf.reshape(tf.cast(bias, rows.dtype), [*shape[:-1], *between, shape[-1]])
