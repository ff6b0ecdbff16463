"""Optimizers that keep moments of the gradient, in a choice of dtypes, with weight decay.

optimizer.py describes the narrow formats.
"""

from __future__ import annotations

import math

from lingvo_gshard.core import MATRIX, NestedMap, Params, VariableSpec, tf
from lingvo_gshard.core.layer import TABLE, is_vector
from lingvo_gshard.sharding import weight_patterns
from lingvo_gshard.training.step import optimizer

# Names of moments: a running mean of gradients, and one of their squares.
FIRST_MOMENT, SECOND_MOMENT = "first_moment", "second_moment"
# Roles of the weights that decay.
_DECAYING = (MATRIX, TABLE)


def decayed_mean(old: tf.Tensor, new: tf.Tensor, beta: float) -> tf.Tensor:
    """Returns beta * old + (1 - beta) * new in float32.

    Near 1 the share of the new value is used in place of beta: it is small, so that float32 rounds
    it less.
    """
    if beta < 0.5:
        return beta * old + (1.0 - beta) * new
    return old + (1.0 - beta) * (new - old)


def bias_correction(beta: float, step: tf.Tensor) -> tf.Tensor:
    """Returns 1 - beta^t with t = step + 1 in float32.

    1 - tf.pow(beta, t) would lose all digits that beta^t has in common with 1.

    Args:
      beta: decay of a mean that starts at 0.
      step: an int32 scalar that counts from 0.
    """
    if not beta:
        return tf.ones([])
    return -tf.math.expm1((tf.cast(step, tf.float32) + 1.0) * math.log(beta))


class MomentOptimizer(optimizer.Optimizer):
    """An optimizer whose moments have the layout of the weight.

    A subclass lists its moments in `moment_names`. `load` reads a moment and `store` writes one.
    Both methods use float32, whatever `moment_dtype` is; optimizer.py describes the narrow
    formats. In int8 each moment has scales, an array of the weight's layout without its last
    letter. Moments of vectors stay float32, since they are small.
    """

    moment_names: tuple[str, ...] = (FIRST_MOMENT,)

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        about = f"Type of the moments: {', '.join(optimizer.DTYPES)}."
        p.define("moment_dtype", optimizer.FLOAT32, about, choices=optimizer.DTYPES)
        p.define(
            "weight_decay",
            0.0,
            "Decoupled decay of matrices and tables, times the rate.",
            minimum=0,
        )
        p.define("weight_decay_exclude", (), "Patterns of paths of weights without decay.")
        return p

    def check(self, specs: NestedMap) -> None:
        super().check(specs)
        where = "step.optimizer.weight_decay_exclude"
        weight_patterns.check(where, self.p.weight_decay_exclude, specs)

    def moment_layouts(self, spec: VariableSpec) -> dict[str, str]:
        layouts = {name: spec.layout for name in self.moment_names}
        if self._dtype(spec) == optimizer.INT8:
            layouts |= {_scale(name): spec.layout[:-1] for name in self.moment_names}
        return layouts

    def moment_dtypes(self, spec: VariableSpec) -> dict[str, str]:
        dtype = self._dtype(spec)
        if dtype == optimizer.INT8:
            return {one: "uint8" if one == SECOND_MOMENT else "int8" for one in self.moment_names}
        return dict.fromkeys(self.moment_names, dtype)

    def load(self, step: optimizer.WeightStep, name: str) -> tf.Tensor:
        """Returns a moment in float32."""
        moments = step.moments
        if self._dtype(step.spec) != optimizer.INT8:
            return tf.cast(moments[name], tf.float32)
        read = optimizer.dequantize_square if name == SECOND_MOMENT else optimizer.dequantize
        return read(moments[name], moments[_scale(name)])

    def store(
        self, step: optimizer.WeightStep, name: str, value: tf.Tensor
    ) -> tuple[tf.Tensor, optimizer.Moments]:
        """Stores a new float32 value of a moment.

        Returns:
          The value to compute the update from, and the arrays to keep. The value is the committed
          one for float32 moments, and not yet rounded for narrow ones.
        """
        dtype, moments = self._dtype(step.spec), step.moments
        if dtype == optimizer.FLOAT32:
            value = step.commit(moments[name], value)
            return value, {name: value}
        key = step.rounding_key(f"{step.spec.path}/{name}")
        if dtype == optimizer.BFLOAT16:
            return value, {name: step.commit(moments[name], optimizer.to_bfloat16(value, key))}
        write = optimizer.quantize_square if name == SECOND_MOMENT else optimizer.quantize
        parts = zip((name, _scale(name)), write(value, key), strict=True)
        return value, {part: step.commit(moments[part], new) for part, new in parts}

    def with_decay(self, step: optimizer.WeightStep, change: tf.Tensor) -> tf.Tensor:
        """Returns `change` plus weight decay, the amount to subtract from a weight.

        The decay is decoupled from the gradient (Loshchilov and Hutter 2019, arXiv 1711.05101,
        section 2). Weights with the role of a bias or a scale do not decay, nor do weights that
        `weight_decay_exclude` matches.
        """
        decay, spec = self.p.weight_decay, step.spec
        if not decay or spec.role not in _DECAYING:
            return change
        if any(weight_patterns.matches(p, spec) for p in self.p.weight_decay_exclude):
            return change
        return change + step.learning_rate * (decay / spec.learning_rate_factor) * step.weight

    def _dtype(self, spec: VariableSpec) -> str:
        if self.p.moment_dtype == optimizer.INT8 and is_vector(spec.layout):
            return optimizer.FLOAT32
        return self.p.moment_dtype


def _scale(name: str) -> str:
    return f"{name}_scale"
