"""Execution: runs the layers of a stack."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import context, tf
from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.autodiff.remat_unit import rematerialized
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import Layer, layer_method, stop_frozen
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.repetition import Repetition
from lingvo_gshard.layers.stacks.batch_parts import run_interleaved


class Execution(Layer):
    """Runs the layers of `body` in sequence, `times` times, with different weights each time.

    A subclass defines how this is compiled. All subclasses compute one function, and the initial
    weights of a layer do not depend on the subclass.

    Attributes:
      repetition: the names of the layers in each iteration.
    """

    @classmethod
    def splits_shared(cls, params: Params) -> bool:
        """Returns whether an execution splits the tensors that layers share by rows.

        All of them must then have the rows of the batch.
        """
        return params.interleaved > 1

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("body", (), "Params of the layers of the body. Set by the stack.")
        p.define("times", 0, "Number of iterations of the body. Set by the stack.", minimum=1)
        p.define(
            "rematerialize",
            remat_policy.NONE,
            "Which results the backward pass computes a second time: a policy of "
            "core/autodiff/remat_policy.py.",
        )
        p.define(
            "interleaved",
            1,
            "Number of parts of a training batch that each layer computes one after the other, so "
            "that collectives of one part, such as the experts' all-to-all, can run under the "
            "computation of another. Experts are routed within a part.",
            minimum=1,
        )
        return p

    @classmethod
    def for_layers(cls, params: Params, layers: Sequence[Params], period: int, path: str) -> Params:
        """Returns a copy of the Params of an execution that runs `layers`.

        Args:
          params: Params of this class, as the user set them.
          period: layer i + period has the Params of layer i.
          path: path of `params`, for error messages.

        Raises:
          UserError: the layers do not divide into whole periods.
        """
        if len(layers) % period:
            raise UserError(
                f"{path}: {cls.__name__} needs a multiple of {period} layers (moe_every, "
                f"attention_pattern), and there are {len(layers)}; sequential_first "
                "lets the first few run one by one"
            )
        return params.copy().set(body=tuple(layers[:period]), times=len(layers) // period)

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        remat_policy.check(p.rematerialize, f"{path}.rematerialize")
        self.create_children("body", list(p.body))
        self.repetition = Repetition(path, len(p.body), p.times)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Returns [B,L,M]: x through all layers, called as `layer.fprop(theta, x, *shared)`."""
        raise NotImplementedError(f"{type(self).__name__} defines no fprop")

    @layer_method
    def unrolled(self, theta: NestedMap) -> list[tuple[Layer, NestedMap]]:
        """Returns all layers with their weights, in the order of execution."""
        raise NotImplementedError(f"{type(self).__name__} defines no unrolled")

    def layer_counts(self) -> list[tuple[Layer, int]]:
        """Returns (layer, number of times that a forward pass runs it) for the body."""
        return [(layer, self.p.times) for layer in self.body]

    def layers_in_order(self) -> list[Layer]:
        """Returns the layer that runs at each place, as `unrolled` does."""
        return list(self.body) * self.p.times

    def check_batch(self, rows: int, path: str) -> None:
        """Checks that a batch can be run.

        Args:
          path: path of the Params of this execution, for error messages.

        Raises:
          UserError: the batch cannot be run.
        """
        parts = self.p.interleaved
        if rows % parts and context.current().training:
            raise UserError(
                f"{path}.interleaved={parts} does not divide the {rows} rows of a batch "
                "(input.batch_rows, or those of a micro-batch)"
            )

    def run_layers(
        self, layers: Sequence[tuple[Layer, NestedMap]], x_BLM: tf.Tensor, *shared: object
    ) -> tf.Tensor:
        """Returns [B,L,M]: x through layers with weights, in interleaved parts in training."""
        if self.p.interleaved > 1 and context.current().training:
            return run_interleaved(layers, x_BLM, shared, self.p.interleaved)
        for layer, theta in layers:
            x_BLM = layer.fprop(theta, x_BLM, *shared)
        return x_BLM


class Sequential(Execution):
    """Runs layers that are compiled separately, each as its own part of the program.

    `Sequential` behaves as a list of layers: layer i is `self[i]`, with the path `<path>[i]` and
    the weights `theta[i]`.
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
        if self.p.rematerialize == remat_policy.NONE:
            return self.run_layers(self.unrolled(theta), x_BLM, *shared)
        for layer, layer_theta in self.unrolled(theta):
            x_BLM = self.run_rematerialized(layer, layer_theta, x_BLM, *shared)
        return x_BLM

    @layer_method
    def unrolled(self, theta: Sequence[NestedMap]) -> list[tuple[Layer, NestedMap]]:
        return list(zip(self.body, theta, strict=True))

    def run_rematerialized(
        self, layer: Layer, layer_theta: NestedMap, x_BLM: tf.Tensor, *shared: object
    ) -> tf.Tensor:
        flat = tf.nest.flatten(shared)

        def run(x_BLM: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            here = tf.nest.pack_sequence_as(shared, tensors[: len(flat)])
            specs = layer.variable_specs().flatten()
            weights = layer_theta.pack(stop_frozen(specs, tensors[len(flat) :]))
            return self.run_layers([(layer, weights)], x_BLM, *here)

        weights = layer_theta.flatten()
        return rematerialized(run, self.p.rematerialize, [x_BLM, *flat], weights)
