"""Optimizer: an update rule for one weight, applied to a tree of weights.

An optimizer holds no tensors. The moments of all weights are a tree like theta, with a small map of
named tensors in the place of each weight. A moment's layout is made of its weight's letters, so it
is sharded as the weight is.

Moments may be stored in bfloat16 or int8 between steps, in place of float32. bfloat16 is the upper
half of a float32.

int8 stores 8 bits for each element and a float32 scale for each block (Dettmers et al. 2021, arXiv
2110.02861, section 2). A block is a row along the last dimension, so scales are sharded as the rows
are. Levels are scale x (q / Q)^2, finer towards zero. A second moment is stored by its root, since
it spans the square of the gradients' range. Its elements are read as at least the lowest level. The
update would otherwise divide by almost nothing where an element was rounded to zero.

Both formats are rounded stochastically. In a step a moment changes by a share 1 - beta of itself,
often less than half a level, and rounding to nearest would lose every such change. The random
numbers depend on the step and the moment's path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from lingvo_gshard.core import Seam, initializers, random_numbers, tf
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import VariableSpec, scope_name
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import OPTIMIZER_SCOPE
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.sharding import weight_patterns

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
DTYPES = (FLOAT32, BFLOAT16, INT8)
_SIGNED_LEVELS, _ROOT_LEVELS = 127, 255


def to_bfloat16(x: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Rounds float32 `x` stochastically to bfloat16."""
    below = tf.constant(0xFFFF, tf.uint32)
    chance = tf.bitwise.bitwise_and(random_numbers.hashed_words(known_sizes(x.shape), key), below)
    bits = tf.bitcast(x, tf.uint32) + chance
    upper = tf.bitwise.bitwise_and(bits, tf.bitwise.invert(below))
    return tf.cast(tf.bitcast(upper, tf.float32), tf.bfloat16)


def quantize(x: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns int8 levels [..., N] and float32 scales [...] of a float32 moment [..., N]."""
    levels, scale = _levels(tf.abs(x), _SIGNED_LEVELS, key)
    return tf.cast(tf.sign(x) * levels, tf.int8), scale


def dequantize(levels: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns the float32 moment that `quantize` stored."""
    share = tf.cast(levels, tf.float32) / _SIGNED_LEVELS
    return tf.expand_dims(scale, -1) * share * tf.abs(share)


def quantize_square(x: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns uint8 levels and float32 scales of the root of a moment that is 0 or more."""
    levels, scale = _levels(tf.sqrt(x), _ROOT_LEVELS, key)
    return tf.cast(levels, tf.uint8), scale


def dequantize_square(levels: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Returns the float32 moment that `quantize_square` stored, at least the lowest level."""
    share = tf.maximum(tf.cast(levels, tf.float32), 1.0) / _ROOT_LEVELS
    return tf.square(tf.expand_dims(scale, -1) * share * share)


def _levels(x: tf.Tensor, most: int, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns levels 0..most, as float32, and scales of x >= 0. Rounds without bias."""
    scale = tf.reduce_max(x, -1)
    rows = tf.expand_dims(scale, -1)
    level = tf.minimum(tf.sqrt(tf.math.divide_no_nan(x, rows)), 1.0) * most
    lower = tf.floor(level)
    # (lower + 1)^2 - lower^2 = 2 lower + 1.
    upward = (level * level - lower * lower) / (2.0 * lower + 1.0)
    chance = random_numbers.hashed_uniform(known_sizes(x.shape), key)
    return lower + tf.cast(chance < upward, tf.float32), scale


def rounding_key(path: str, step: tf.Tensor) -> tf.Tensor:
    """Returns the int32 [2] key of the random numbers that round an array after a step."""
    return tf.stack([tf.constant(random_numbers.word(path), tf.int32), tf.cast(step, tf.int32)])


_FACTORS = "step.optimizer.learning_rate_factors"

# The moments of one weight, by name.
Moments: TypeAlias = "dict[str, tf.Tensor]"


@dataclasses.dataclass(frozen=True)
class WeightStep:
    """One step of one weight: everything that the weight's update depends on.

    Attributes:
      weight: float32.
      gradient: float32, of the weight's shape.
      moments: in their own dtypes.
      number: an int32 scalar, the number of the step, which counts from 0.
      learning_rate: a float32 scalar.
      is_skipped: a bool scalar; if true, the step must not change weight and moments.
      shared: the optimizer's `shared_values` of the step.
      first_element: for one of several stacked layers, the index of its first element in the stack
        modulo 2^32, an int32 scalar. None stands for 0.
    """

    spec: VariableSpec
    weight: tf.Tensor
    gradient: tf.Tensor
    moments: Moments
    number: tf.Tensor
    learning_rate: tf.Tensor
    is_skipped: tf.Tensor | bool = False
    shared: Mapping[str, tf.Tensor] = dataclasses.field(default_factory=dict)
    first_element: tf.Tensor | None = None

    def rounding_key(self, path: str) -> tf.Tensor:
        """Returns the int32 [2] key of the random numbers that round an array after the step.

        A layer of a stack is rounded as the whole stack would be: the numbers are hashes of the key
        plus the index of an element.
        """
        key = rounding_key(path, self.number)
        if self.first_element is None:
            return key
        return key + tf.stack([self.first_element, 0])

    def commit(self, old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
        """Returns the new value of a weight or a moment, the old one if the step is skipped."""
        return tf.where(self.is_skipped, old, new)


class Optimizer(Configurable):
    """A functional update rule.

    A subclass defines the moments of a weight (`moment_layouts`, `moment_dtypes`) and the update of
    a weight (`update_weight`). Two kinds of weights have no moments and skip `update_weight`:
    weights with an update rule of their own, and weights with a learning-rate factor of 0, which do
    not move.

    Flags or a gin file choose an optimizer and set its Params:

        --gin_param='step.optimizer = @lingvo_gshard.training.step.adam.Adam'
        --gin_param='step.optimizer.learning_rate_factors = {"*embedding": 0.1, "decoder": 0}'
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "learning_rate_factors",
            {},
            "Pattern of weight paths -> factor of the learning rate. A weight uses the first "
            "pattern that matches; a factor of 0 freezes it.",
        )
        return p

    def __init__(self, params: Params):
        """Raises ValueError naming a factor that is negative or not finite."""
        super().__init__(params)
        for pattern, factor in params.learning_rate_factors.items():
            if not (isinstance(factor, (int, float)) and 0.0 <= factor < math.inf):
                raise UserError(f"{_FACTORS}[{pattern!r}] is {factor!r}; 0 or more expected")

    def check(self, specs: NestedMap) -> None:
        """Checks the Params against the weights of a model.

        Raises:
          UserError: a pattern matches no weight, or all weights are frozen.
        """
        weight_patterns.check(_FACTORS, self.p.learning_rate_factors, specs)
        if not any(self.moves(spec) for spec in specs.flatten()):
            raise UserError(f"{_FACTORS}: {self.p.learning_rate_factors} leaves no weight to train")

    def moves(self, spec: VariableSpec) -> bool:
        """Returns whether `update_weight` updates a weight."""
        return not spec.update_rule and self.learning_rate_factor(spec) > 0.0

    def frozen(self, specs: NestedMap) -> frozenset[str]:
        """Returns the paths of the weights that never change, and so need no gradient."""
        return frozenset(
            spec.path
            for spec in specs.flatten()
            if not self.moves(spec) and (spec.is_frozen or not spec.update_rule)
        )

    def learning_rate_factor(self, spec: VariableSpec) -> float:
        """Returns the factor of a weight's learning rate."""
        for pattern, factor in self.p.learning_rate_factors.items():
            if weight_patterns.matches(pattern, spec):
                return float(factor) * spec.learning_rate_factor
        return 0.0 if spec.is_frozen else spec.learning_rate_factor

    def moment_layouts(self, spec: VariableSpec) -> dict[str, str]:
        """Returns name -> layout of a weight's moments.

        A layout is a selection of the letters of the weight's layout, in the same order.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no moment_layouts")

    def moment_dtypes(self, spec: VariableSpec) -> dict[str, str]:
        """Returns name -> dtype of the moments that are not float32."""
        del spec
        return {}

    def update_weight(self, step: WeightStep) -> tuple[tf.Tensor, Moments]:
        """Returns a weight and its moments after one step.

        Everything returned must go through `step.commit`. Compute the weight from the committed
        moments where these are float32: XLA then updates both in place, and copies the moments
        otherwise.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no update_weight")

    def change(self, step: WeightStep) -> tf.Tensor:
        """Returns what a step has subtracted from a weight, for update-to-weight ratios.

        An optimizer that does not define it has no ratios.

        Args:
          step: the step, with the moments after it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no change")

    def moment_specs(self, specs: NestedMap) -> NestedMap:
        """Returns the moments' tree of VariableSpec, for the weights' tree. Moments start at 0."""
        return specs.transform(
            lambda spec: NestedMap(
                {
                    name: _moment_spec(spec, name, layout, self.moment_dtypes(spec))
                    for name, layout in self._layouts_of_moved(spec).items()
                }
            )
        )

    def update(
        self,
        specs: NestedMap,
        theta: NestedMap,
        gradients: NestedMap,
        moments: NestedMap,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        is_skipped: tf.Tensor | bool = False,
    ) -> tuple[NestedMap, NestedMap]:
        """Returns (theta, moments) after one step, computed in float32.

        bfloat16 weights are rounded stochastically. Updates smaller than half a unit in the last
        place then move a weight by the right amount on average (Gupta et al. 2015, arXiv
        1502.02551; for bfloat16 weights Zamirai et al. 2020, arXiv 2010.06192).

        Args:
          specs: the tree of VariableSpec of theta and gradients.
          moments: a tree like `moment_specs(specs)`.
          step: an int32 scalar that counts from 0.
          learning_rate: a float32 scalar.
          is_skipped: a bool scalar; if true, theta and moments are returned unchanged.
        """
        new_weights, new_moments = [], []
        shared = self.shared_values(step)
        for spec, weight, gradient, own in self.rows(specs, theta, gradients, moments):
            new_weight, own = self.update_one(
                WeightStep(spec, weight, gradient, own, step, learning_rate, is_skipped, shared)
            )
            new_weights.append(new_weight)
            new_moments.append(NestedMap(own))
        return specs.pack(new_weights), specs.pack(new_moments)

    def shared_values(self, number: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns tensors by name that the updates of all weights share, to compute them once.

        Args:
          number: an int32 scalar, the number of the step, which counts from 0.
        """
        del number
        return {}

    def update_one(self, step: WeightStep) -> tuple[tf.Tensor, Moments]:
        """Returns a weight, in its own dtype, and its moments after one step."""
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/{scope_name(step.spec.path)}/"):
            updated, moments = self._update_by_rule(step)
            return _stored(step, updated), moments

    def rows(
        self, specs: NestedMap, theta: NestedMap, gradients: NestedMap, moments: NestedMap
    ) -> Iterator[tuple[VariableSpec, tf.Tensor, tf.Tensor, Moments]]:
        """Yields each weight's spec, value, gradient and moments by name."""
        flat_moments = iter(moments.flatten())
        rows = zip(specs.flatten(), theta.flatten(), gradients.flatten(), strict=True)
        for spec, weight, gradient in rows:
            own = {name: next(flat_moments) for name in sorted(self._layouts_of_moved(spec))}
            yield spec, weight, gradient, own

    def _update_by_rule(self, step: WeightStep) -> tuple[tf.Tensor, Moments]:
        """Updates one weight by its own rule, by `update_weight`, or not at all."""
        spec, rate = step.spec, step.learning_rate
        weight, gradient = tf.cast(step.weight, tf.float32), tf.cast(step.gradient, tf.float32)
        if spec.update_rule and not spec.is_frozen:
            return step.commit(weight, spec.update_rule(weight, gradient)), step.moments
        factor = self.learning_rate_factor(spec)
        if not factor or spec.update_rule:
            return step.weight, step.moments
        rate = rate if factor == 1.0 else factor * rate
        step = dataclasses.replace(step, weight=weight, gradient=gradient, learning_rate=rate)
        return self.update_weight(step)

    def _layouts_of_moved(self, spec: VariableSpec) -> dict[str, str]:
        return self.moment_layouts(spec) if self.moves(spec) else {}


def _stored(step: WeightStep, updated: tf.Tensor) -> tf.Tensor:
    """Returns an updated weight in its own dtype. Values that the dtype holds do not change."""
    dtype = step.weight.dtype
    if dtype == tf.bfloat16 and updated.dtype == tf.float32:
        return to_bfloat16(updated, step.rounding_key(step.spec.path))
    return tf.cast(updated, dtype)


def _moment_spec(
    spec: VariableSpec, name: str, layout: str, dtypes: dict[str, str]
) -> VariableSpec:
    sizes = dict(zip(spec.layout, spec.shape, strict=True))
    return dataclasses.replace(
        spec,
        path=f"{spec.path}/{name}",
        layout=layout,
        shape=tuple(sizes[letter] for letter in layout),
        dtype=dtypes.get(name, "float32"),
        initializer=initializers.constant(0.0),
    )


# Optimizers that the package's experiments choose by name.
OPTIMIZERS: Seam[type[Optimizer]] = Seam("optimizers")
