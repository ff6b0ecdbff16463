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
from collections.abc import Sequence

from lingvo_gshard.core import OPTIMIZER_SCOPE, NestedMap, Params, VariableSpec, tf
from lingvo_gshard.sharding import layer_of
from lingvo_gshard.training import STEP_PARTS, Ingredients, Optimizer, StepPart, Update, WeightStep

# The name of the metric after the layer's path.
NAME = "update_ratio"


@STEP_PARTS.register("update ratios")
class UpdateRatios(StepPart):
    """Computes the ratios of a trainer's steps."""

    @classmethod
    def define(cls, p: Params) -> None:
        p.define(
            "update_ratios_every",
            0,
            "Steps between update-to-weight ratios; 0: none.",
            minimum=0,
            changes_results=False,
        )

    @classmethod
    def of(cls, made: Ingredients) -> UpdateRatios | None:
        """Returns the ratios of a trainer, if its Params ask for them."""
        every = made.params.update_ratios_every
        return cls(every, made.optimizer, made.theta_specs) if every else None

    def __init__(self, every: int, optimizer: Optimizer, specs: NestedMap):
        """Prepares ratios that every K-th step logs. An optimizer without `change` has none."""
        self._every = every
        self._optimizer, self._specs = optimizer, specs

    def measure(self, update: Update, state: NestedMap) -> dict[str, tf.Tensor]:
        """Returns the metrics `<layer>/update_ratio`, which are 0 in steps that are not logged.

        Args:
          state: the state after the step.
        """
        if type(self._optimizer).change is Optimizer.change:
            return {}
        pairs = zip(self._specs.flatten(), state.theta.flatten(), strict=True)
        moved = [(spec, weight) for spec, weight in pairs if self._optimizer.moves(spec)]
        layers = list(dict.fromkeys(layer_of(path) for spec, _ in moved for path in _paths(spec)))

        def compute() -> tf.Tensor:
            changes = self._changes(update, state)
            ratios = _ratios(layers, [(*pair, c) for pair, c in zip(moved, changes, strict=True)])
            return tf.where(update.is_skipped, 0.0, ratios)

        is_due = tf.equal(state.step % self._every, 0)
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/"):
            values = tf.cond(is_due, compute, lambda: tf.zeros([len(layers)]))
        names = (f"{layer}/{NAME}" for layer in layers)
        return dict(zip(names, tf.unstack(values, len(layers)), strict=True))

    def _changes(self, update: Update, state: NestedMap) -> list[tf.Tensor]:
        """Returns what a step has subtracted from each weight that the optimizer moves."""
        optimizer, number, found = self._optimizer, update.updates, []
        shared = optimizer.shared_values(number)
        # The gradients are computed within the branch.
        rows = optimizer.rows(self._specs, state.theta, update.clipped(), state.moments)
        for spec, weight, gradient, own in rows:
            if optimizer.moves(spec):
                weight, gradient = tf.cast(weight, tf.float32), tf.cast(gradient, tf.float32)
                rate = optimizer.learning_rate_factor(spec) * update.learning_rate
                after = WeightStep(spec, weight, gradient, own, number, rate, shared=shared)
                # Weight decay depends on the weight before the step, which the first gives.
                before = dataclasses.replace(after, weight=weight + optimizer.change(after))
                found.append(optimizer.change(before))
        return found

    def shown_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics without ratios, unless the step is logged."""
        if step % self._every == 0:
            return metrics
        return {name: value for name, value in metrics.items() if not name.endswith(f"/{NAME}")}


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
