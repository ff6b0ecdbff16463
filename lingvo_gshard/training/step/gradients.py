"""Gradients: the forward and the backward pass of a training step, for a batch or in its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, cast

from lingvo_gshard.core import context
from lingvo_gshard.core.layer import stop_frozen
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step import micro_batches
from lingvo_gshard.training.step.measured import Measured
from lingvo_gshard.training.step.micro_batches import TensorBatch
from lingvo_gshard.training.step.precision import Precision


class Gradients:
    """Computes the loss, the metrics and the gradients of a task's weights."""

    def __init__(
        self,
        task: Task,
        precision: Precision,
        theta_specs: NestedMap,
        frozen: Collection[str],
        measured: Measured | None = None,
        parts: int = 1,
        reduce_dtype: str = "float32",
    ):
        """Takes what all steps have in common.

        Args:
          task: defines the loss.
          precision: types of weights and activations.
          theta_specs: the weights' tree of VariableSpec.
          frozen: paths of the weights that are not trained.
          measured: what steps measure beside the weights, if there is anything.
          parts: number of parts of a batch that are computed in sequence.
          reduce_dtype: see `micro_batches.accumulate`.
        """
        self._task, self._precision, self._theta_specs = task, precision, theta_specs
        self._frozen, self._measured = frozen, measured
        self._parts, self._reduce_dtype = parts, reduce_dtype
        # The weights, and what is measured beside them, as layers read them in a step.
        self._specs = self._joined(theta_specs, measured and measured.specs())

    @property
    def gathers_ahead(self) -> bool:
        """Whether loops over layers gather weights one layer ahead; see `context.Context`.

        With several micro-batches they do not, since each would gather all weights again.
        """
        return self._precision.has_master_weights and self._parts == 1

    def context(self, key: tf.Tensor) -> context.Context:
        """Returns the context of one forward pass of a training step.

        Args:
          key: int32 [2], seeds the random numbers.
        """
        return context.Context(
            True, key, extensions=self._precision.extensions, frozen=self._frozen
        )

    def __call__(
        self,
        theta: NestedMap,
        batch: TensorBatch,
        key: tf.Tensor,
        on_output: Callable[[str, tf.Tensor], None] | None = None,
        scale: tf.Tensor | None = None,
        on_result: context.ResultObserver | None = None,
        own_measured: NestedMap | None = None,
    ) -> micro_batches.Result:
        """Returns the training loss, the metrics and the gradients of the weights.

        Gradients of frozen weights are not computed, and are 0. If `own_measured` is
        given, what the pass measures for it is the entry of the gradients of the part's name.

        Args:
          theta: the weights.
          batch: feature name -> tensor.
          key: int32 [2], seeds the random numbers.
          on_output: called with each layer's output in forward order, as in `context.scope`.
          scale: a float32 scalar that multiplies the loss in the backward pass. The returned
            gradients are divided by it.
          on_result: called with the results of each layer, as in `context.Context`.
          own_measured: the measured part of the state; by default the one before the first step.
        """
        own = self._measured and (own_measured or self._measured.begin(theta))
        ahead = self.gathers_ahead
        weights = self._precision.layer_weights(self._theta_specs, theta, gathers_ahead=ahead)
        weights = self._joined(weights, own)
        passing = dataclasses.replace(
            self.context(key),
            on_output=on_output,
            on_result=on_result,
            beside=self._measured and self._measured.beside,
            gathers_ahead=ahead,
        )
        compute = self._of_part if self._parts == 1 else self._of_parts
        loss, metrics, gradients = compute(weights, batch, passing, scale)
        found = iter(gradients.flatten())
        pairs = zip(self._specs.flatten(), weights.flatten(), strict=True)
        complete = [
            tf.zeros(w.shape, s.dtype) if s.path in self._frozen else next(found) for s, w in pairs
        ]
        if self._measured is None:
            return loss, metrics, theta.pack(complete)
        gradients, measured = self._measured.parted(theta, complete)
        if own_measured is not None:
            gradients[self._measured.name] = measured
        return loss, metrics, gradients

    def _joined(self, theta: NestedMap, own: NestedMap | None) -> NestedMap:
        """Returns a tree like the weights, joined with what is measured beside them."""
        return self._measured.joined(theta, own) if self._measured and own else theta

    def _trained(self, tree: NestedMap) -> NestedMap:
        """Returns the leaves of a tree like `_specs` that are not frozen, in their order."""
        pairs = zip(self._specs.flatten(), tree.flatten(), strict=True)
        return NestedMap(leaves=[leaf for spec, leaf in pairs if spec.path not in self._frozen])

    def _of_part(
        self,
        theta: NestedMap,
        batch: TensorBatch,
        passing: context.Context,
        scale: tf.Tensor | None,
    ) -> micro_batches.Result:
        """Returns loss, metrics and gradients of one pass, as a part of a batch adds them up."""
        trained = self._trained(theta)
        with context.use(passing) as scope, tf.GradientTape() as tape:
            tape.watch(trained.flatten())
            weights = stop_frozen(self._specs.flatten(), theta.flatten())
            loss, metrics = self._task.loss(theta.pack(weights), batch)
            loss = micro_batches.share_of_loss(loss, metrics, scope)
        flat = tape.gradient(
            loss,
            trained.flatten(),
            output_gradients=cast(Any, scale),  # The stubs want a list, also of one loss.
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        gradients = trained.pack(tf.convert_to_tensor(g) for g in flat)
        if scale is not None:
            gradients = gradients.transform(lambda g: tf.cast(g, tf.float32) / scale)
        return loss, {**metrics, **scope.metrics}, gradients

    def _of_parts(
        self,
        theta: NestedMap,
        batch: TensorBatch,
        passing: context.Context,
        scale: tf.Tensor | None,
    ) -> micro_batches.Result:
        """Returns what `_of_part` does for a whole batch, computed in parts."""

        def compute(
            part: TensorBatch, key: tf.Tensor, weights: micro_batches.LossWeights
        ) -> micro_batches.Result:
            now = dataclasses.replace(passing.part(), seed=key, batch_weights=weights)
            return self._of_part(theta, part, now, scale)

        def weigh(part: TensorBatch, key: tf.Tensor) -> micro_batches.LossWeights:
            unobserved = dataclasses.replace(
                passing.part(), seed=key, on_output=None, on_result=None
            )
            with context.use(unobserved) as now:
                return micro_batches.loss_weights(now, self._task.loss(theta, part)[1])

        assert passing.seed is not None
        return micro_batches.accumulate(
            compute,
            weigh,
            batch,
            passing.seed,
            self._parts,
            self._trained(self._specs),
            self._reduce_dtype,
        )
