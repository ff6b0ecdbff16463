"""The position-wise feed-forward layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lingvo_gshard.core import Layer, NestedMap, Params, UserError, initializers, layer_method, tf
from lingvo_gshard.layers.products import add_bias, product

_FUNCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "relu": lambda h: tf.nn.relu(h),
    "squared_relu": lambda h: tf.square(tf.nn.relu(h)),
    "gelu": lambda h: tf.nn.gelu(h),
    "gelu_tanh": lambda h: tf.nn.gelu(h, approximate=True),
    "silu": lambda h: tf.nn.silu(h),
    "tanh": lambda h: tf.math.tanh(h),
    "sigmoid": lambda h: tf.math.sigmoid(h),
    "linear": lambda h: tf.identity(h),
}
# Gated activations and the functions of their gates. Shazeer 2020, arXiv 2002.05202.
GATES = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "linear",
}
# Clamped SwiGLU, of gpt-oss (https://github.com/openai/gpt-oss, `swiglu` of its reference model).
CLAMPED = "clamped_swiglu"

# gpt-oss multiplies by sigmoid(1.702 h), clamps at 7, and adds 1 to the factor.
_GATE_OPTIONS = {"gate_alpha": 1.702, "gate_limit": 7.0, "gate_offset": 1.0}


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function of a hidden tensor. If it is gated, its result is multiplied by a second tensor.

    Attributes:
      function: elementwise function.
      is_gated: whether the activation takes a second tensor.
      factor_function: elementwise function of the second tensor.
    """

    function: Callable[[tf.Tensor], tf.Tensor]
    is_gated: bool
    factor_function: Callable[[tf.Tensor], tf.Tensor] = lambda factor: factor

    def __call__(self, h: tf.Tensor, factor: tf.Tensor | None = None) -> tf.Tensor:
        """Returns function(h), multiplied by the function of the factor if there is one."""
        activated = self.function(h)
        return activated if factor is None else activated * self.factor_function(factor)


def define(p: Params) -> None:
    """Adds the options of an activation to the Params of a layer."""
    about, choices = "The activation; some have a gate.", (*_FUNCTIONS, *GATES, CLAMPED)
    p.define("activation", "relu", about, choices=choices)
    alpha, limit, offset = _GATE_OPTIONS.values()
    p.define("gate_alpha", alpha, "Of clamped_swiglu: a of the gate h sigmoid(a h).", minimum=0)
    about = "Of clamped_swiglu: h is at most this number, and the factor's magnitude, too."
    p.define("gate_limit", limit, about, above=0)
    p.define("gate_offset", offset, "Of clamped_swiglu: is added to the factor.", minimum=0)


def options(p: Params) -> dict[str, str | float]:
    """Returns the options that `define` adds, to set them in other Params."""
    return {name: p.get(name) for name in ("activation", *_GATE_OPTIONS)}


def of(p: Params, path: str) -> Activation:
    """Returns the activation of a layer whose Params have the options of `define`.

    Raises:
      UserError: the activation does not read an option that is set.
    """
    name = p.activation
    if name == CLAMPED:
        return _clamped_swiglu(p.gate_alpha, p.gate_limit, p.gate_offset)
    for option in _GATE_OPTIONS:
        if p.get(option) != p.default(option):
            raise UserError(
                f"{path}.{option}: {p.get(option)} with {path}.activation={name!r}, which does not "
                f"read it; leave {p.default(option)} or choose {CLAMPED!r}"
            )
    if name in GATES:
        return Activation(_FUNCTIONS[GATES[name]], True)
    return Activation(_FUNCTIONS[name], False)


def _clamped_swiglu(alpha: float, limit: float, offset: float) -> Activation:
    """Returns (f + offset) h sigmoid(alpha h), where h <= limit and the factor |f| <= limit."""

    def gate(h: tf.Tensor) -> tf.Tensor:
        h = tf.minimum(h, tf.constant(limit, h.dtype))
        return h * tf.math.sigmoid(alpha * h)

    def factor_function(factor: tf.Tensor) -> tf.Tensor:
        bound = tf.constant(limit, factor.dtype)
        return tf.clip_by_value(factor, -bound, bound) + offset

    return Activation(gate, True, factor_function)


class FeedForward(Layer):
    """activation(x w_in + b_in) w_out + b_out. Vaswani et al. 2017, arXiv 1706.03762, 3.3.

    The result of a gated activation, such as swiglu, is multiplied by x w_factor + b_factor.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("hidden_dim", 0, "Size of H.", minimum=1)
        define(p)
        p.define("use_bias", True, "Whether the products add a bias.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        sizes = {"M": p.model_dim, "H": p.hidden_dim}
        self.activation = of(p, path)
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
        """Returns [B,L,M] in the type of x. Padding is computed like any token."""
        del mask_BL
        h_BLH = self._project_in(theta, "in", x_BLM)
        factor_BLH = self._project_in(theta, "factor", x_BLM) if self.activation.is_gated else None
        h_BLH = self.activation(h_BLH, factor_BLH)
        y_BLM = product(self, theta, "w_out", "BLH,HM->BLM", h_BLH)
        if self.p.use_bias:
            y_BLM = add_bias(y_BLM, tf.cast(theta.b_out, y_BLM.dtype))
        return self.observe(y_BLM)

    @layer_method
    def _project_in(self, theta: NestedMap, name: str, x_BLM: tf.Tensor) -> tf.Tensor:
        h_BLH = product(self, theta, f"w_{name}", "BLM,MH->BLH", x_BLM)
        if not self.p.use_bias:
            return h_BLH
        return add_bias(h_BLH, tf.cast(theta[f"b_{name}"], h_BLH.dtype))
