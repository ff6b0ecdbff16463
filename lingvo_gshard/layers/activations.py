"""Activation functions by name, plain and gated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lingvo_gshard.core.config import names
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


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function of a hidden tensor. If it is gated, its result is multiplied by a second tensor.

    Attributes:
      function: elementwise function.
      is_gated: whether the activation takes a second tensor.
    """

    function: Callable[[tf.Tensor], tf.Tensor]
    is_gated: bool

    def __call__(self, h: tf.Tensor, factor: tf.Tensor | None = None) -> tf.Tensor:
        """Returns function(h), multiplied by the factor if there is one."""
        return self.function(h) if factor is None else self.function(h) * factor


def get(name: str, path: str) -> Activation:
    """Returns the activation of a name.

    Args:
      name: such as "relu" or "swiglu".
      path: path of the layer, for error messages.

    Raises:
      ValueError: the name is unknown.
    """
    if name in _GATED:
        return Activation(_FUNCTIONS[_GATED[name]], True)
    if name in _FUNCTIONS:
        return Activation(_FUNCTIONS[name], False)
    nearest = names.nearest(name, [*_FUNCTIONS, *_GATED])
    raise ValueError(f"{path}.activation: unknown activation {name!r}. {nearest}")
