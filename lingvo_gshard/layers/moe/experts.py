"""Experts: E feed-forward networks with stacked weights."""

from __future__ import annotations

from collections.abc import Callable

from lingvo_gshard.core import Layer, NestedMap, Params, initializers, layer_method, tf
from lingvo_gshard.layers import feed_forward, products
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.products import add_bias, multiply, product, rounded_by_rows
from lingvo_gshard.sharding import annotate, axes_of, parts_of

LOCAL_LETTERS = {"r": "rows sorted by expert, with room for more"}


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
        feed_forward.define(p)
        p.define("use_bias", False, "Whether to add biases to the products.")
        p.define_fraction("dropout_rate", 0.0, "Share of hidden activations dropped in training.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self.activation = feed_forward.of(p, path)
        sizes = {"E": p.num_experts, "M": p.model_dim, "H": p.hidden_dim}
        for name in self.input_products:
            init = initializers.fan_in(p.model_dim)
            self.create_variable(f"w_{name}", "EMH", sizes, init, inputs="M")
        init = initializers.fan_in(p.hidden_dim)
        self.create_variable("w_out", "EHM", sizes, init, inputs="H")
        if p.use_bias:
            for name in self.input_products:
                self.create_variable(f"b_{name}", "EH", sizes, initializers.constant(0.0))
            self.create_variable("b_out", "EM", sizes, initializers.constant(0.0))
        self.create_child("dropout", Dropout.params().set(rate=p.dropout_rate))

    @property
    def input_products(self) -> tuple[str, ...]:
        """Returns the names of the products with the input."""
        return ("in", "factor") if self.activation.is_gated else ("in",)

    @property
    def parts(self) -> int:
        """The number of parts of H that can be computed apart, each on devices of its own.

        1 if H is not split, or not evenly, or if a rule has an `obstacle`.
        """
        parts = parts_of("EGCH")[3]
        if self.p.hidden_dim % parts or products.obstacle(self.variable_specs()):
            return 1
        groups, slots, model = axes_of("GECM")[0], axes_of("EGCM"), axes_of("GSM")[2]
        own = axes_of("EGCH")[3]
        fits = axes_of("GECU") == (groups, *axes_of("GECM")[1:3], own)
        return parts if fits and axes_of("EGCU") == (*slots[:3], own) and not model else 1

    @layer_method
    def fprop(self, theta: NestedMap, x_EGCM: tf.Tensor) -> tf.Tensor:
        """Returns [E,G,C,M]: each expert's output for the rows in its buffers, in x's dtype.

        Args:
          x_EGCM: the rows; or [E,G,C,U], a row for each of `parts`. The result is then [E,G,C,U]:
            outputs of the parts, whose sum is the experts' output.
        """
        parts = x_EGCM.shape[-1] // self.p.model_dim
        if parts > 1:
            return self._compute_parts(theta, x_EGCM, parts)
        return self._compute(theta, x_EGCM, "EGCM,EMH->EGCH", "EGCH,EHM->EGCM")

    @layer_method
    def compute_one(self, theta: NestedMap, x_CM: tf.Tensor) -> tf.Tensor:
        """Returns one expert's outputs [C,M] for its rows.

        Which rows are computed together depends on the mesh. Training in 8 bits therefore rounds
        them by scales of single rows.

        Args:
          theta: the weights of that expert, without the dimension E; maybe `decoding_weights`.
        """
        with rounded_by_rows():
            return self._compute(theta, x_CM, "CM,MH->CH", "CH,HM->CM")

    @layer_method
    def _compute(
        self, theta: NestedMap, x: tf.Tensor, input_equation: str, output_equation: str
    ) -> tf.Tensor:
        h = self._hidden(theta, lambda name: product(self, theta, name, input_equation, x))
        y = product(self, theta, "w_out", output_equation, h)
        return add_bias(y, _broadcast(theta.b_out, y)) if self.p.use_bias else y

    @layer_method
    def _hidden(self, theta: NestedMap, project: Callable[[str], tf.Tensor]) -> tf.Tensor:
        """Returns the hidden activations.

        Args:
          project: returns the product of the input with the weight of a name.
        """

        def hidden(name: str) -> tf.Tensor:
            h = project(f"w_{name}")
            return add_bias(h, _broadcast(theta[f"b_{name}"], h)) if self.p.use_bias else h

        return self.activate(theta, hidden)

    @layer_method
    def activate(self, theta: NestedMap, hidden: Callable[[str], tf.Tensor]) -> tf.Tensor:
        """Returns the hidden activations, with dropout.

        Args:
          hidden: returns the product of the input with the weight of a name, and its bias.
        """
        factor = hidden("factor") if self.activation.is_gated else None
        return self.dropout.fprop(theta.dropout, self.activation(hidden("in"), factor))

    @layer_method
    def _compute_parts(self, theta: NestedMap, x_EGCU: tf.Tensor, parts: int) -> tf.Tensor:
        """Returns [E,G,C,U]: the output of each part of the hidden activations."""
        experts, groups, slots, _ = x_EGCU.shape.as_list()
        model_dim, part = self.p.model_dim, self.p.hidden_dim // parts
        x_EUGCM = _parts_first(tf.reshape(x_EGCU, [experts, groups, slots, parts, model_dim]), "M")

        def project(name: str) -> tf.Tensor:
            w_EUMH = tf.transpose(
                tf.reshape(theta[name], [experts, model_dim, parts, part]), (0, 2, 1, 3)
            )
            h_EUGCH = multiply("EUGCM,EUMH->EUGCH", x_EUGCM, w_EUMH, theta, (name,))
            h_EGCUH = tf.transpose(h_EUGCH, (0, 2, 3, 1, 4))
            return annotate(tf.reshape(h_EGCUH, [experts, groups, slots, parts * part]), "EGCH")

        h_EGCH = self._hidden(theta, project)
        h_EUGCH = _parts_first(tf.reshape(h_EGCH, [experts, groups, slots, parts, part]), "H")
        w_EUHM = tf.reshape(theta.w_out, [experts, parts, part, model_dim])
        y_EUGCM = multiply("EUGCH,EUHM->EUGCM", h_EUGCH, w_EUHM, theta, ("w_out",))
        if self.p.use_bias:
            # The first part alone adds it.
            b_EUM = tf.pad(theta.b_out[:, tf.newaxis], [[0, 0], [0, parts - 1], [0, 0]])
            y_EUGCM = add_bias(y_EUGCM, _broadcast(b_EUM, y_EUGCM))
        y_EGCUM = tf.transpose(y_EUGCM, (0, 2, 3, 1, 4))
        return annotate(tf.reshape(y_EGCUM, [experts, groups, slots, parts * model_dim]), "EGCU")


def _parts_first(x_EGCUM: tf.Tensor, last: str) -> tf.Tensor:
    """Returns [E,U,G,C,...]: with the dimensions of independent products first."""
    return annotate(tf.transpose(x_EGCUM, (0, 3, 1, 2, 4)), f"EUGC{last}")


def _broadcast(bias: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns the bias in the type of the rows, shaped to broadcast over the rows of an expert."""
    shape = bias.shape.as_list()
    between = [1] * (rows.shape.rank - bias.shape.rank)
    return tf.reshape(tf.cast(bias, rows.dtype), [*shape[:-1], *between, shape[-1]])
