"""Activation functions by name, plain and gated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf

_FUNCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "relu": lambda h: tf.nn.relu(h),
    "gelu": lambda h: tf.nn.gelu(h),
    "gelu_tanh": lambda h: tf.nn.gelu(h, approximate=True),
    "silu": lambda h: tf.nn.silu(h),
    "tanh": lambda h: tf.math.tanh(h),
    "sigmoid": lambda h: tf.math.sigmoid(h),
    "linear": lambda h: tf.identity(h),
}

# Gated activations and the functions of their gates. Shazeer 2020, arXiv 2002.05202.
_GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "linear",
}


# Clamped SwiGLU, of gpt-oss (https://github.com/openai/gpt-oss, `swiglu` of its reference model).
_CLAMPED = "clamped_swiglu"
_ALPHA, _LIMIT = 1.702, 7.0


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
    p.define("activation", "relu", "Name of an activation of layers/activations.py.")
    p.define("gate_alpha", _ALPHA, "Of clamped_swiglu: a of the gate h sigmoid(a h).", minimum=0)
    p.define(
        "gate_limit",
        _LIMIT,
        "Of clamped_swiglu: h is at most this number, and the factor's magnitude, too.",
        above=0,
    )


def options(p: Params) -> dict[str, str | float]:
    """Returns the options that `define` adds, to set them in other Params."""
    return {name: p.get(name) for name in ("activation", "gate_alpha", "gate_limit")}


def of(p: Params, path: str) -> Activation:
    """Returns the activation of a layer.

    Args:
      p: Params of the layer, with the options of `define`.
      path: path of the layer, for error messages.

    Raises:
      UserError: the activation is unknown, or does not read an option that is set.
    """
    name = p.activation
    if name == _CLAMPED:
        return _clamped_swiglu(p.gate_alpha, p.gate_limit)
    for option in ("gate_alpha", "gate_limit"):
        if p.get(option) != p.default(option):
            raise UserError(
                f"{path}.{option}: {p.get(option)} with {path}.activation={name!r}, which does not "
                f"read it; leave {p.default(option)} or choose {_CLAMPED!r}"
            )
    if name in _GATED:
        return Activation(_FUNCTIONS[_GATED[name]], True)
    if name in _FUNCTIONS:
        return Activation(_FUNCTIONS[name], False)
    nearest = names.nearest(name, [*_FUNCTIONS, *_GATED, _CLAMPED])
    raise UserError(f"{path}.activation: unknown activation {name!r}. {nearest}")


def _clamped_swiglu(alpha: float, limit: float) -> Activation:
    """Returns (f + 1) h sigmoid(alpha h), where h <= limit and the factor |f| <= limit."""

    def gate(h: tf.Tensor) -> tf.Tensor:
        h = tf.minimum(h, tf.constant(limit, h.dtype))
        return h * tf.math.sigmoid(alpha * h)

    def factor_function(factor: tf.Tensor) -> tf.Tensor:
        bound = tf.constant(limit, factor.dtype)
        return tf.clip_by_value(factor, -bound, bound) + 1.0

    return Activation(gate, True, factor_function)
