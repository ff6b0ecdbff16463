"""Activations by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core.config import names

_FUNCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "relu": tf.nn.relu,
    "gelu": tf.nn.gelu,
    "silu": tf.nn.silu,
    "tanh": tf.math.tanh,
    "sigmoid": tf.math.sigmoid,
    "linear": tf.identity,
}

# By the function of the gate: Shazeer 2020, "GLU variants improve Transformer", arXiv 2002.05202.
_GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "linear",
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function of one hidden tensor; where it is gated, multiplied by another one."""

    function: Callable[[tf.Tensor], tf.Tensor]
    is_gated: bool

    def __call__(self, h: tf.Tensor, factor: tf.Tensor | None = None) -> tf.Tensor:
        """Returns function(h), times the factor of a gated one."""
        return self.function(h) if factor is None else self.function(h) * factor


def get(name: str, path: str) -> Activation:
    """Returns the activation; ValueError naming the layer's path if there is none of that name."""
    if name in _GATED:
        return Activation(_FUNCTIONS[_GATED[name]], True)
    if name in _FUNCTIONS:
        return Activation(_FUNCTIONS[name], False)
    nearest = names.nearest(name, [*_FUNCTIONS, *_GATED])
    raise ValueError(f"{path}.activation: unknown activation {name!r}. {nearest}")
