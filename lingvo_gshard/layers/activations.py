"""Activations by name."""

from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core import names

_ACTIVATIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "relu": tf.nn.relu,
    "gelu": tf.nn.gelu,
    "silu": tf.nn.silu,
    "tanh": tf.math.tanh,
}


def get(name: str, path: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the activation; ValueError naming the layer's path if there is none of that name."""
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"{path}.activation: unknown activation {name!r}. {names.nearest(name, _ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]
