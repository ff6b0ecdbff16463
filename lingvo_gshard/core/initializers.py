"""Stateless initializers: a weight from its shape and a key, the same on every mesh."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from lingvo_gshard.core import random_numbers


@dataclasses.dataclass(frozen=True)
class Initializer:
    """How a weight begins.

    kind: "normal" (standard deviation `scale`), "truncated_normal" (the same, cut at two standard
    deviations), "uniform" (between -scale and scale) or "constant" (the value `scale`).
    """

    kind: str
    scale: float

    def __call__(self, shape: tuple[int, ...], dtype: tf.DType, key: tf.Tensor) -> tf.Tensor:
        """Returns the initial weight; `key` is an int32 [2] tensor."""
        if self.kind == "constant":
            return tf.fill(shape, tf.cast(self.scale, dtype))
        value = _SAMPLERS[self.kind](shape, key) * self.scale
        return tf.cast(value, dtype)


_SAMPLERS = {
    "normal": random_numbers.normal,
    "truncated_normal": random_numbers.truncated_normal,
    "uniform": lambda shape, key: 2.0 * random_numbers.uniform(shape, key) - 1.0,
}


def constant(value: float) -> Initializer:
    """Every element is `value`."""
    return Initializer("constant", value)


def normal(scale: float) -> Initializer:
    """Gaussian with standard deviation `scale`."""
    return Initializer("normal", scale)


def fan_in(inputs: int, gain: float = 1.0) -> Initializer:
    """Gaussian whose variance is `gain` / inputs (He et al. 2015, arXiv 1502.01852, 2.2)."""
    return Initializer("normal", math.sqrt(gain / inputs))


def glorot_uniform(inputs: int, outputs: int) -> Initializer:
    """Uniform of variance 2 / (inputs + outputs) (Glorot and Bengio 2010, equation 16)."""
    return Initializer("uniform", math.sqrt(6.0 / (inputs + outputs)))
