"""What every optimizer is: a rule for one weight, and the walk over the tree of them.

An optimizer holds no tensors. Its slots are a tree like theta with a small map of named tensors at
the place of each weight; their layouts are made of the weight's letters, so that they are split
over a mesh as the weight is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec, scope_name
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.params import Configurable

# Around the name scopes of what an optimizer computes, which are those of the weights' paths.
SCOPE = "optimizer"

Slots = dict[str, tf.Tensor]
# keep(old, new): new, but old in a step that must change nothing.
Keep = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class Optimizer(Configurable):
    """A functional update rule: `update(specs, theta, gradients, slots, step, learning_rate)`.

    A subclass says which slots a weight has (`slot_layouts`) and how one weight moves
    (`update_weight`). Weights with a rule of their own have no slots and move by that.
    """

    def slot_layouts(self, spec: VariableSpec) -> dict[str, str]:
        """Returns slot name -> its layout, each a selection of the weight's letters in order."""
        raise NotImplementedError(f"{type(self).__name__} defines no slot_layouts")

    def update_weight(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        keep: Keep,
    ) -> tuple[tf.Tensor, Slots]:
        """Returns one weight and its slots after a step.

        All tensors are float32; `step` counts from 0 and `learning_rate` is a scalar. What is
        returned goes through `keep` first, and the weight is computed from the slots as kept: XLA
        then updates both in place, where it would else copy every slot.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no update_weight")

    def slot_specs(self, specs: NestedMap) -> NestedMap:
        """Returns the slots' VariableSpec tree: float32, zero at the start."""
        return specs.transform(
            lambda spec: NestedMap(
                {
                    name: _slot_spec(spec, name, layout)
                    for name, layout in self._slots_of(spec).items()
                }
            )
        )

    def update(
        self,
        specs: NestedMap,
        theta: NestedMap,
        gradients: NestedMap,
        slots: NestedMap,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        stopped: tf.Tensor | bool = False,
    ) -> tuple[NestedMap, NestedMap]:
        """Returns (theta, slots) after one step; computed in float32, whatever the weights' type.

        specs: the tree of VariableSpec, which gives theta, gradients and slots their structure.
        stopped: a bool scalar; where it is true, theta and slots come back as they were.
        """

        def keep(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            return tf.where(stopped, old, new)

        weights, slot_maps = [], []
        flat_slots = iter(slots.flatten())
        rows = zip(specs.flatten(), theta.flatten(), gradients.flatten(), strict=True)
        for spec, weight, gradient in rows:
            slot = {name: next(flat_slots) for name in sorted(self._slots_of(spec))}
            with tf.name_scope(f"{SCOPE}/{scope_name(spec.path)}/"):
                weight_32, gradient_32 = tf.cast(weight, tf.float32), tf.cast(gradient, tf.float32)
                if spec.update_rule:
                    updated = keep(weight_32, spec.update_rule(weight_32, gradient_32))
                else:
                    updated, slot = self.update_weight(
                        spec, weight_32, gradient_32, slot, step, learning_rate, keep
                    )
                weights.append(tf.cast(updated, weight.dtype))
            slot_maps.append(NestedMap(slot))
        return specs.pack(weights), specs.pack(slot_maps)

    def _slots_of(self, spec: VariableSpec) -> dict[str, str]:
        return {} if spec.update_rule else self.slot_layouts(spec)


def _slot_spec(spec: VariableSpec, name: str, layout: str) -> VariableSpec:
    sizes = dict(zip(spec.layout, spec.shape, strict=True))
    return dataclasses.replace(
        spec,
        path=f"{spec.path}/{name}",
        layout=layout,
        shape=tuple(sizes[letter] for letter in layout),
        dtype="float32",
        initializer=initializers.constant(0.0),
    )
