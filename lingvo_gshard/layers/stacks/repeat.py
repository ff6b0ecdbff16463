"""Repeat: a stack of layers compiled as one loop."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.remat_unit import RematUnit, Reports
from lingvo_gshard.core.layer import Layer, VariableSpec, layer_method, stop_frozen
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.repetition import Iteration
from lingvo_gshard.layers.stacks.execution import Execution
from lingvo_gshard.layers.stacks.loop import Loop
from lingvo_gshard.sharding import annotate, annotate_like

# Letters of the input and the output of every layer.
_ACTIVATIONS = "BLM"


class Repeat(Execution):
    """Runs `body`, `times` times, in one compiled loop.

    The time to compile it does not depend on the number of layers. A weight of `body[1]` is a stack
    over the letter R of the weights that layers 1, 3, 5, ... would have in a body of two. Each
    layer has the initial weights, random numbers and metric names that it would have without the
    loop.
    """

    def variable_specs(self) -> NestedMap:
        """Returns the VariableSpecs of the body, each with a leading dimension R."""
        return super().variable_specs().transform(self._stacked)

    def _stacked(self, spec: VariableSpec) -> VariableSpec:
        return dataclasses.replace(
            spec,
            layout=f"R{spec.layout}",
            shape=(self.p.times, *spec.shape),
            slices=tuple(self.repetition.paths(spec.path)),
        )

    @layer_method
    def unrolled(self, theta: NestedMap) -> list[tuple[Layer, NestedMap]]:
        """Returns all layers with their weights, in the order in which they run."""
        return [pair for r in range(self.p.times) for pair in self._body_of_iteration(theta, r)]

    @layer_method
    def _body_of_iteration(self, theta: NestedMap, r: int) -> list[tuple[Layer, NestedMap]]:
        # Slices need annotations of their own.
        pairs = zip(theta.flatten(), super().variable_specs().flatten(), strict=True)
        weights = theta.pack(annotate_like(weight[r], spec) for weight, spec in pairs)
        return list(zip(self.body, weights.body, strict=True))

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Returns [B,L,M]; see the base class."""
        if tf.executing_eagerly():
            return self._fprop_eagerly(theta, x_BLM, *shared)
        specs = super().variable_specs()
        flat = tf.nest.flatten(shared)

        def run_body(x_BLM: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            layer_inputs = tf.nest.pack_sequence_as(shared, tensors[: len(flat)])
            weights = specs.pack(stop_frozen(specs.flatten(), tensors[len(flat) :]))
            x_BLM = annotate(x_BLM, _ACTIVATIONS)
            for layer, layer_theta in zip(self.body, weights.body, strict=True):
                x_BLM = layer.fprop(layer_theta, x_BLM, *layer_inputs)
            return annotate(x_BLM, _ACTIVATIONS)

        body = RematUnit(run_body, self.p.rematerialize)
        loop = Loop(body, self.repetition, _ACTIVATIONS, specs.flatten())
        result = loop.run(x_BLM, *flat, *theta.flatten())
        result.reports.stacked(self.repetition).add_to(context.current(), result.values)
        return result.output

    @layer_method
    def _fprop_eagerly(self, theta: NestedMap, x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Runs the layers one by one: in eager mode no loop is compiled."""
        forward_pass, values = context.current(), []
        for r in range(self.p.times):
            with context.use(forward_pass.part(Iteration(self.repetition, r))) as part:
                for layer, layer_theta in self._body_of_iteration(theta, r):
                    x_BLM = layer.fprop(layer_theta, x_BLM, *shared)
            reports = Reports.of(part)
            values.append(reports.values)
        stacks = [tf.stack(over_iterations) for over_iterations in zip(*values, strict=True)]
        reports.stacked(self.repetition).add_to(forward_pass, stacks)
        return x_BLM
