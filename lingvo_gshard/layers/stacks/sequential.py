"""Sequential: a stack whose layers are compiled one by one."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.autodiff.remat_unit import rematerialized
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method, stop_frozen
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.stacks.execution import Execution


class Sequential(Execution):
    """Runs layers that are compiled separately, each as its own part of the program.

    It behaves as a list of its layers: layer i is `self[i]`, its path is `<path>[i]`, and its
    weights are `theta[i]`.
    """

    @classmethod
    def for_layers(cls, params: Params, layers: Sequence[Params], period: int, path: str) -> Params:
        """Returns a copy of the Params with all layers as the body; the period is not used."""
        del period, path
        return params.copy().set(body=tuple(layers), times=1)

    def __getitem__(self, index: int) -> Layer:
        return self.body[index]

    def __len__(self) -> int:
        return len(self.body)

    def _join(self, name: str) -> str:
        return self.path if name == "body" else super()._join(name)

    def variable_specs(self) -> list[NestedMap]:
        """Returns the trees of VariableSpec of the layers, in order."""
        return [layer.variable_specs() for layer in self.body]

    @layer_method
    def fprop(self, theta: Sequence[NestedMap], x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Returns [B,L,M]; see the base class."""
        for layer, layer_theta in self.unrolled(theta):
            x_BLM = self._run(layer, layer_theta, x_BLM, *shared)
        return x_BLM

    @layer_method
    def unrolled(self, theta: Sequence[NestedMap]) -> list[tuple[Layer, NestedMap]]:
        """Returns all layers with their weights, in the order in which they run."""
        return list(zip(self.body, theta, strict=True))

    def _run(
        self, layer: Layer, layer_theta: NestedMap, x_BLM: tf.Tensor, *shared: object
    ) -> tf.Tensor:
        if self.p.rematerialize == remat_policy.NONE:
            return layer.fprop(layer_theta, x_BLM, *shared)
        flat = tf.nest.flatten(shared)

        def run(x_BLM: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            here = tf.nest.pack_sequence_as(shared, tensors[: len(flat)])
            specs = layer.variable_specs().flatten()
            weights = layer_theta.pack(stop_frozen(specs, tensors[len(flat) :]))
            return layer.fprop(weights, x_BLM, *here)

        weights = layer_theta.flatten()
        return rematerialized(run, self.p.rematerialize, [x_BLM, *flat], weights)
