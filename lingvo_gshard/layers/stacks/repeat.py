"""Repeat: a stack of like layers as one compiled loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.remat_unit import RematUnit, Reports
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, VariableSpec, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.repetition import Iteration, Repetition
from lingvo_gshard.layers.stacks.execution import Execution
from lingvo_gshard.layers.stacks.loop import Loop
from lingvo_gshard.sharding import annotate

# Of what every layer of a stack takes and returns.
_CARRIED = "BLM"


class Repeat(Execution):
    """`body`, a layer or several that take turns, run `times` times over weights of its own.

    Computes what the layers one after another would, and is compiled in the same time however many
    they are. A weight of layer `body[1]` is a stack over the letter R of what would be the weights
    of `[1]`, `[3]`, ... Each begins, draws random numbers and reports metrics by that name.
    """

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self._repetition = Repetition(path, len(self.p.body), self.p.times)

    def variable_specs(self) -> NestedMap:
        """Returns the body's tree of VariableSpec, each with R before its dimensions."""
        return super().variable_specs().transform(self._stacked)

    def _stacked(self, spec: VariableSpec) -> VariableSpec:
        return dataclasses.replace(
            spec,
            layout=f"R{spec.layout}",
            shape=(self.p.times, *spec.shape),
            slices=tuple(self._repetition.paths(spec.path)),
        )

    @layer_method
    def unrolled(self, theta: NestedMap) -> list[tuple[Layer, NestedMap]]:
        """Returns the layers of the body with their weights, one after another, time after time."""
        return [pair for r in range(self.p.times) for pair in self._body_at(theta, r)]

    @layer_method
    def _body_at(self, theta: NestedMap, r: int) -> list[tuple[Layer, NestedMap]]:
        at_r = theta.transform(lambda weight: weight[r])
        return list(zip(self.body, at_r.body, strict=True))

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Returns [B,L,M]: x through all layers, each called with (theta, x, *shared).

        Args:
          theta: weights of all layers.
          x_BLM: input of the first layer.
          *shared: nests of tensors that every layer reads.
        """
        if tf.executing_eagerly():
            return self._fprop_eagerly(theta, x_BLM, shared)
        specs = super().variable_specs()
        flat = tf.nest.flatten(shared)

        def body(x_BLM: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            here = tf.nest.pack_sequence_as(shared, tensors[: len(flat)])
            at_time = specs.pack(tensors[len(flat) :])
            x_BLM = annotate(x_BLM, _CARRIED)
            for layer, layer_theta in zip(self.body, at_time.body, strict=True):
                x_BLM = layer.fprop(layer_theta, x_BLM, *here)
            return annotate(x_BLM, _CARRIED)

        unit = RematUnit(body, self.p.rematerialize)
        loop = Loop(unit, self._repetition, _CARRIED, specs.flatten())
        outcome = loop.run(x_BLM, *flat, *theta.flatten())
        outcome.reports.stacked(self._repetition).add_to(context.current(), outcome.values)
        return outcome.output

    @layer_method
    def _fprop_eagerly(self, theta: NestedMap, x_BLM: tf.Tensor, shared: Sequence) -> tf.Tensor:
        """The layers one by one, where no loop is compiled."""
        pass_under_way, values = context.current(), []
        for r in range(self.p.times):
            with context.use(pass_under_way.part(Iteration(self._repetition, r))) as part:
                for layer, layer_theta in self._body_at(theta, r):
                    x_BLM = layer.fprop(layer_theta, x_BLM, *shared)
            reports = Reports.of(part)
            values.append(reports.values)
        stacks = [tf.stack(over_times) for over_times in zip(*values, strict=True)]
        reports.stacked(self._repetition).add_to(pass_under_way, stacks)
        return x_BLM
