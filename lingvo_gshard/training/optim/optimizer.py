"""What every optimizer is: a rule for one weight, and the walk over the tree of them.

An optimizer holds no tensors. Its moments are a tree like theta with a small map of named tensors
at the place of each weight; their layouts are made of the weight's letters, so that they are split
over a mesh as the weight is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.layer import VariableSpec, scope_name
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.optim import narrow_moments, weight_groups

# Around the name scopes of what an optimizer computes, which are those of the weights' paths.
SCOPE = "optimizer"

_FACTORS = "trainer.optimizer.learning_rate_factors"

Moments = dict[str, tf.Tensor]
# commit(old, new): new, but old in a step that must change nothing.
Commit = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class Optimizer(Configurable):
    """A functional update rule: `update(specs, theta, gradients, moments, step, learning_rate)`.

    A subclass says which moments a weight has (`moment_layouts`), of which types (`moment_dtypes`),
    and how one weight moves (`update_weight`). Weights with a rule of their own have no moments and
    move by that; weights with a learning rate of 0 have none either and stay as they are.

    A class is chosen, and then its Params set, in a gin file or by two flags:

        --gin_param='trainer.optimizer = @lingvo_gshard.training.optim.adam.Adam'
        --gin_param='trainer.optimizer.learning_rate_factors = {"*embedding": 0.1, "decoder": 0}'
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "learning_rate_factors",
            {},
            "Pattern of paths -> factor of the learning rate; the first that matches a weight "
            "holds. 0: the weights stay as they are.",
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        for pattern, factor in params.learning_rate_factors.items():
            if not (isinstance(factor, (int, float)) and 0.0 <= factor < math.inf):
                raise ValueError(f"{_FACTORS}[{pattern!r}] is {factor!r}; 0 or more expected")

    def check(self, specs: NestedMap) -> None:
        """Raises ValueError, naming the Params path, for a pattern that means none of the weights.

        And if no weight is left for the optimizer to move.
        """
        weight_groups.check(_FACTORS, self.p.learning_rate_factors, specs)
        if not any(self.moves(spec) for spec in specs.flatten()):
            raise ValueError(
                f"{_FACTORS}: {self.p.learning_rate_factors} leaves no weight to train"
            )

    def moves(self, spec: VariableSpec) -> bool:
        """Returns whether the optimizer moves a weight: not if its learning rate is 0."""
        return not spec.update_rule and self.learning_rate_factor(spec) > 0.0

    def learning_rate_factor(self, spec: VariableSpec) -> float:
        """Returns what a weight's learning rate is multiplied by."""
        for pattern, factor in self.p.learning_rate_factors.items():
            if weight_groups.matches(pattern, spec):
                return float(factor)
        return 1.0

    def moment_layouts(self, spec: VariableSpec) -> dict[str, str]:
        """Returns moment name -> its layout, each a selection of the weight's letters in order."""
        raise NotImplementedError(f"{type(self).__name__} defines no moment_layouts")

    def moment_dtypes(self, spec: VariableSpec) -> dict[str, str]:
        """Returns moment name -> its type, of those moments that are not float32."""
        del spec
        return {}

    def update_weight(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        moments: Moments,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        commit: Commit,
    ) -> tuple[tf.Tensor, Moments]:
        """Returns one weight and its moments after a step.

        Weight and gradient are float32, moments of their own types; `step` counts from 0 and
        `learning_rate` is a scalar. What is returned goes through `commit` first, and where moments
        are float32 the weight is computed from them as kept: XLA then updates both in place, where
        it would else copy every moment.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no update_weight")

    def moment_specs(self, specs: NestedMap) -> NestedMap:
        """Returns the moments' VariableSpec tree: zero at the start."""
        return specs.transform(
            lambda spec: NestedMap(
                {
                    name: _moment_spec(spec, name, layout, self.moment_dtypes(spec))
                    for name, layout in self._moment_layouts_of(spec).items()
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
        stopped: tf.Tensor | bool = False,
    ) -> tuple[NestedMap, NestedMap]:
        """Returns (theta, moments) after one step; computed in float32, whatever the weights' type.

        Weights that are kept in bfloat16 are rounded to it at random, so that steps smaller than
        half of its last place move them, too, on average as far as they should (Gupta et al. 2015,
        arXiv 1502.02551; in training with bfloat16 weights alone: Zamirai et al. 2020, arXiv
        2010.06192).

        specs: the tree of VariableSpec, which gives theta, gradients and moments their structure.
        stopped: a bool scalar; where it is true, theta and moments come back as they were.
        """

        def commit(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            return tf.where(stopped, old, new)

        weights, moment_maps = [], []
        flat_moments = iter(moments.flatten())
        rows = zip(specs.flatten(), theta.flatten(), gradients.flatten(), strict=True)
        for spec, weight, gradient in rows:
            moment = {name: next(flat_moments) for name in sorted(self._moment_layouts_of(spec))}
            factor = self.learning_rate_factor(spec)
            with tf.name_scope(f"{SCOPE}/{scope_name(spec.path)}/"):
                weight_32, gradient_32 = tf.cast(weight, tf.float32), tf.cast(gradient, tf.float32)
                if spec.update_rule:
                    updated = commit(weight_32, spec.update_rule(weight_32, gradient_32))
                elif not factor:
                    updated = weight
                else:
                    rate = learning_rate if factor == 1.0 else factor * learning_rate
                    updated, moment = self.update_weight(
                        spec, weight_32, gradient_32, moment, step, rate, commit
                    )
                weights.append(_stored(spec, updated, weight.dtype, step))
            moment_maps.append(NestedMap(moment))
        return specs.pack(weights), specs.pack(moment_maps)

    def _moment_layouts_of(self, spec: VariableSpec) -> dict[str, str]:
        return self.moment_layouts(spec) if self.moves(spec) else {}


def check_decays(params: Params, *names: str) -> None:
    """Raises ValueError naming the hyperparameter of an optimizer that is not in [0, 1)."""
    for name in names:
        if not 0.0 <= params.get(name) < 1.0:
            raise ValueError(
                f"trainer.optimizer.{name} is {params.get(name)}; it must be in [0, 1)"
            )


def _stored(spec: VariableSpec, updated: tf.Tensor, dtype: tf.DType, step: tf.Tensor) -> tf.Tensor:
    """A weight as it is kept; what the type holds exactly, as in a stopped step, stays as it is."""
    if dtype == tf.bfloat16 and updated.dtype == tf.float32:
        return narrow_moments.to_bfloat16(updated, narrow_moments.key(spec.path, step))
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
