"""Measured: the part of a trainer's state that layers have beside their weights in a step."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import NestedMap, VariableSpec, context, tf
from lingvo_gshard.tasks import Task
from lingvo_gshard.training import StatePart, Update


class Measured(StatePart):
    """Keeps arrays beside a task's weights, in the order of the layers' trees.

    Layers read the arrays in a step. The gradients of the arrays are what the step measures.
    Update rules of the declarations make the arrays after the step.
    """

    is_measured = True

    def __init__(self, task: Task, beside: context.Beside):
        """Declares the arrays of the layers of a task by `beside`; see `context.Context`."""
        self.beside = beside
        with context.override(beside=beside):
            self._tree = task.variable_specs()
        found = [spec for spec in self._tree.flatten() if spec.is_measured]
        # Adapters freeze the weights below them, whose arrays go on.
        self._specs = NestedMap(leaves=[dataclasses.replace(s, is_frozen=False) for s in found])

    def specs(self) -> NestedMap:
        return self._specs

    def before(self, own: NestedMap) -> dict[str, NestedMap]:
        """Returns the arrays that layers read. The step measures for them."""
        return {"own_measured": own}

    def joined(self, theta: NestedMap, own: NestedMap) -> NestedMap:
        """Returns the tree that layers read in a training step: weights and arrays of `specs()`."""
        weights, arrays = iter(theta.flatten()), iter(own.flatten())
        specs = self._tree.flatten()
        return self._tree.pack(next(arrays if spec.is_measured else weights) for spec in specs)

    def parted(self, theta: NestedMap, joined: list[tf.Tensor]) -> tuple[NestedMap, NestedMap]:
        """Returns trees like the weights and like `specs()` of all leaves: undoes `joined`."""
        pairs = list(zip(self._tree.flatten(), joined, strict=True))
        weights = theta.pack(leaf for spec, leaf in pairs if not spec.is_measured)
        return weights, self._specs.pack(leaf for spec, leaf in pairs if spec.is_measured)

    def after(self, own: NestedMap, update: Update, theta: NestedMap) -> NestedMap:
        """Returns the arrays after a step, which has measured their gradients."""
        del theta

        def measure(spec: VariableSpec, old: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
            assert spec.update_rule is not None
            return tf.where(update.is_skipped, old, spec.update_rule(old, gradient))

        trees = (self._specs, own, update.seen.measured[self.name])
        return self._specs.pack(map(measure, *(tree.flatten() for tree in trees)))
