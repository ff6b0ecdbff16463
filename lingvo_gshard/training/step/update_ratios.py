"""Update-to-weight ratios: how far a step moves the weights of each layer.

The ratio of a layer is ||update|| / ||weights||, over all of its weights that the optimizer moves.
Squares are summed in float32.

Only steps whose ratios are logged compute ratios: they are a branch of the compiled step. The
branch reads only what the step ends with, the new weights and moments, and the gradients. The old
weights would have to be copied, since a step overwrites them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.scopes import OPTIMIZER_SCOPE
from lingvo_gshard.sharding.weight_patterns import layer_of
from lingvo_gshard.training.step.optimizer import Optimizer


def global_norm(gradients: NestedMap, counts: Sequence[bool]) -> tf.Tensor:
    """Returns the norm over all gradients together, a float32 scalar.

    Squares are summed in float32 and not scaled first, which would read all gradients twice. A norm
    above 1.8e19 is therefore infinite, so that the step counts as not finite. Gradients below 1e-19
    may count as 0; clipping scales large norms only.

    Args:
      gradients: the gradients of the weights.
      counts: whether each gradient counts; False for weights that the optimizer does not move.
    """
    pairs = zip(counts, gradients.flatten(), strict=True)
    return tf.sqrt(tf.add_n([_sum_of_squares(g) for counted, g in pairs if counted]))


@dataclasses.dataclass(frozen=True)
class Clipping:
    """The gradients of a step, scaled to a norm of at most `clip_norm`.

    Source: Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, section 3.2.

    Attributes:
      gradients: the gradients of the weights.
      specs: the weights' tree of VariableSpec. What weights with an update rule get is not scaled.
      norm: their global norm.
      clip_norm: the largest norm; 0 disables clipping.
    """

    gradients: NestedMap
    specs: NestedMap
    norm: tf.Tensor
    clip_norm: float

    def __call__(self) -> NestedMap:
        """Returns all gradients in float32, scaled."""
        scale = self.scale()
        pairs = zip(self.specs.flatten(), self.gradients.flatten(), strict=True)
        return self.gradients.pack(self.scaled(*pair, scale) for pair in pairs)

    def scale(self) -> tf.Tensor:
        """Returns the factor of the gradients, a float32 scalar."""
        if not self.clip_norm:
            return tf.constant(1.0)
        return self.clip_norm / tf.maximum(self.norm, self.clip_norm)

    def scaled(self, spec: VariableSpec, gradient: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """Returns the gradient of one weight, or of one layer of a stack, in float32 and scaled."""
        return tf.cast(gradient, tf.float32) * (1.0 if spec.update_rule else scale)


def _sum_of_squares(gradient: tf.Tensor) -> tf.Tensor:
    # Sums rows first, as means: XLA would merge two sums into one, which is slower on a CPU.
    squares = tf.square(tf.cast(gradient, tf.float32))
    if squares.shape.rank < 2:
        return tf.reduce_sum(squares)
    return tf.reduce_sum(tf.reduce_mean(squares, -1)) * cast(int, squares.shape[-1])


# The name of the metric after the layer's path.
NAME = "update_ratio"


class UpdateRatios:
    """Computes the ratios of a trainer's steps."""

    def __init__(self, every: int, optimizer: Optimizer, specs: NestedMap):
        """Prepares the ratios.

        Args:
          every: K; ratios are logged in every K-th step; 0: in none.
          optimizer: the optimizer. An optimizer that does not define `change` has no ratios.
          specs: the weights' tree of VariableSpec.
        """
        self._every = every if optimizer.has_changes else 0
        self._optimizer, self._specs = optimizer, specs

    def metrics(
        self,
        state: NestedMap,
        clipped: Callable[[], NestedMap],
        updates: tf.Tensor,
        learning_rate: tf.Tensor,
        is_skipped: tf.Tensor,
    ) -> dict[str, tf.Tensor]:
        """Returns the metrics `<layer>/update_ratio`, which are 0 in steps that are not logged.

        Args:
          state: the state after the step.
          clipped: returns the gradients that the optimizer got; called within the branch.
          updates: the number of the update, an int32 scalar, from 0.
          learning_rate: the step's learning rate.
          is_skipped: a bool scalar, whether the step left the weights as they were.
        """
        if not self._every:
            return {}
        pairs = zip(self._specs.flatten(), state.theta.flatten(), strict=True)
        moved = [(spec, weight) for spec, weight in pairs if self._optimizer.moves(spec)]
        layers = list(dict.fromkeys(layer_of(path) for spec, _ in moved for path in _paths(spec)))

        def compute() -> tf.Tensor:
            changes = self._optimizer.changes(
                self._specs, state.theta, clipped(), state.moments, updates, learning_rate
            )
            ratios = _ratios(layers, [(*pair, c) for pair, c in zip(moved, changes, strict=True)])
            return tf.where(is_skipped, 0.0, ratios)

        is_due = tf.equal(state.step % self._every, 0)
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/"):
            values = tf.cond(is_due, compute, lambda: tf.zeros([len(layers)]))
        names = (f"{layer}/{NAME}" for layer in layers)
        return dict(zip(names, tf.unstack(values, len(layers)), strict=True))


def only_if_due(step: int, row: dict[str, float], every: int) -> dict[str, float]:
    """Returns a row of metrics without ratios if the step's are not logged.

    Args:
      step: number of the step.
      row: its metrics.
      every: `step.update_ratios_every`.
    """
    if not every or step % every == 0:
        return row
    return {name: value for name, value in row.items() if not name.endswith(f"/{NAME}")}


def _ratios(
    layers: Sequence[str], moved: Sequence[tuple[VariableSpec, tf.Tensor, tf.Tensor]]
) -> tf.Tensor:
    """Returns the ratio of each layer, from the spec, value and change of each weight."""
    changed: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
    sizes: dict[str, list[tf.Tensor]] = collections.defaultdict(list)
    for spec, weight, change in moved:
        for squares, value in ((changed, change), (sizes, weight)):
            for path, square in zip(_paths(spec), _squares(spec, value), strict=True):
                squares[layer_of(path)].append(square)
    pairs = [(tf.add_n(changed[layer]), tf.add_n(sizes[layer])) for layer in layers]
    return tf.sqrt(tf.stack([tf.math.divide_no_nan(change, size) for change, size in pairs]))


def _paths(spec: VariableSpec) -> Sequence[str]:
    """Returns the paths of the weights that a weight stacks, or its own."""
    return spec.slices if spec.stacked else (spec.path,)


def _squares(spec: VariableSpec, value: tf.Tensor) -> list[tf.Tensor]:
    """Returns the sum of the squares of each weight that a tensor stacks, or of all of it."""
    squares = tf.square(tf.cast(value, tf.float32))
    stacked = spec.stacked
    sums = tf.reduce_sum(squares, list(range(stacked, len(spec.layout))))
    return tf.unstack(tf.reshape(sums, [-1]), len(spec.slices)) if stacked else [sums]
