"""Histories: the part of a trainer's state that delayed scales are made of."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import context
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import delayed_scales
from lingvo_gshard.layers.delayed_scales import is_history
from lingvo_gshard.layers.stacks.pipeline import Pipeline
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step.state_part import Outcome, Seen, StatePart, Verdict

_SETTING = "step.fp8.delayed_scales"


class Histories(StatePart):
    """Keeps the histories of a task's weights, in the order of the layers' trees."""

    name = "histories"

    def __init__(self, task: Task):
        """Declares histories in the layers of a task.

        Raises:
          UserError: a pipeline of the task would add up what its micro-batches measure.
        """
        for layer in task.all_layers():
            if isinstance(layer, Pipeline):
                raise UserError(
                    f"{_SETTING} is True, but {layer.path} is a pipeline, whose micro-batches "
                    f"would add up their magnitudes. Set {_SETTING} = False"
                )
        delayed_scales.add(task)
        with context.override(has_histories=True):
            self._tree = task.variable_specs()
        found = filter(is_history, self._tree.flatten())
        # Adapters freeze the weights below them, whose histories go on.
        self._specs = NestedMap(leaves=[dataclasses.replace(s, is_frozen=False) for s in found])

    def specs(self) -> NestedMap:
        """Returns the histories' tree of VariableSpec."""
        return self._specs

    def before(self, own: NestedMap) -> dict[str, NestedMap]:
        """Returns the histories that layers read. The step measures for them."""
        return {"own_histories": own}

    def joined(self, theta: NestedMap, histories: NestedMap) -> NestedMap:
        """Returns the tree that layers read in a training step.

        Args:
          theta: a tree like the weights.
          histories: a tree like `specs()`.
        """
        weights, own = iter(theta.flatten()), iter(histories.flatten())
        specs = self._tree.flatten()
        return self._tree.pack(next(own) if is_history(spec) else next(weights) for spec in specs)

    def parted(self, theta: NestedMap, joined: list[tf.Tensor]) -> tuple[NestedMap, NestedMap]:
        """Returns trees like the weights and like `specs()`: the inverse of `joined`.

        Args:
          theta: a tree like the weights.
          joined: the leaves of both, in the order of `joined`.
        """
        pairs = list(zip(self._tree.flatten(), joined, strict=True))
        weights = theta.pack(leaf for spec, leaf in pairs if not is_history(spec))
        return weights, self._specs.pack(leaf for spec, leaf in pairs if is_history(spec))

    def after(self, own: NestedMap, seen: Seen, verdict: Verdict, outcome: Outcome) -> NestedMap:
        """Returns the histories after a step, which has measured their gradients."""
        del verdict

        def update(spec: VariableSpec, old: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
            assert spec.update_rule is not None
            return tf.where(outcome.is_skipped, old, spec.update_rule(old, gradient))

        trees = (self._specs, own, seen.measured[self.name])
        return self._specs.pack(map(update, *(tree.flatten() for tree in trees)))
