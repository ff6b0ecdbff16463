"""Stateless initializers: functions of shape and key that give the same weight on every mesh."""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core import random_numbers
from lingvo_gshard.core.lazy import tf


@dataclasses.dataclass(frozen=True)
class Initializer:
    """The distribution of a weight's initial values.

    Attributes:
      kind: "normal" (standard deviation `scale`), "truncated_normal" (the same, truncated at two
        standard deviations), "uniform" (between -scale and scale) or "constant" (`scale`).
    """

    kind: str
    scale: float

    def __call__(self, shape: tuple[int, ...], dtype: tf.DType, key: tf.Tensor) -> tf.Tensor:
        """Returns the initial weight, drawn by an int32 key [2]."""
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
    """Initializes every element to `value`."""
    return Initializer("constant", value)


def normal(scale: float) -> Initializer:
    """Initializes from a Gaussian with standard deviation `scale`."""
    return Initializer("normal", scale)


def fan_in(inputs: int, gain: float = 1.0) -> Initializer:
    """Initializes from a Gaussian of variance gain / inputs (He et al. 2015, arXiv 1502.01852)."""
    return Initializer("normal", math.sqrt(gain / inputs))


def glorot_uniform(inputs: int, outputs: int) -> Initializer:
    """Initializes uniformly, variance 2 / (inputs + outputs) (Glorot and Bengio 2010, eq. 16)."""
    return Initializer("uniform", math.sqrt(6.0 / (inputs + outputs)))
