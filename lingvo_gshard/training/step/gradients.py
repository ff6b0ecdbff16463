"""Gradients: the forward and the backward pass of a training step, for a batch or in its parts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias, cast

from lingvo_gshard.core import NestedMap, context, stop_frozen, tf
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step.precision import Precision

TensorBatch: TypeAlias = "dict[str, tf.Tensor]"
LossAndGradients: TypeAlias = "tuple[tf.Tensor, dict[str, context.Metric], NestedMap]"
# Weights of the losses of a batch by name; see `loss_weights`.
LossWeights: TypeAlias = "dict[str, tf.Tensor]"
# Maps (part of a batch, key, weights of the whole batch) to what the part adds to the loss of the
# batch and to its gradients, and to the metrics of the part.
ComputeGradients: TypeAlias = "Callable[[TensorBatch, tf.Tensor, LossWeights], LossAndGradients]"
# Maps (part of a batch, key) to its weights.
WeighLosses: TypeAlias = "Callable[[TensorBatch, tf.Tensor], LossWeights]"
# Maps (compute, weigh, batch, key, specs of the gradients) to what `compute` would return for the
# whole batch, computed in parts.
AccumulateGradients: TypeAlias = (
    "Callable[[ComputeGradients, WeighLosses, TensorBatch, tf.Tensor, NestedMap], LossAndGradients]"
)
# The key of the task's own loss among the weights of losses. Other keys are names of reports.
OWN_LOSS = ""


def loss_weights(passing: context.Context, metrics: Mapping[str, context.Metric]) -> LossWeights:
    """Returns the weights of the losses of a pass: of the task's own loss, and of each report.

    Args:
      passing: the context of the pass, after it.
      metrics: the metrics that the task returned. Its own loss has the weight of `loss`.
    """
    own = metrics["loss"][1] if "loss" in metrics else tf.ones([])
    reported = {name: w for name, w in passing.loss_weights.items() if w is not None}
    return {OWN_LOSS: own, **reported}


def share_of_loss(
    loss: tf.Tensor, metrics: Mapping[str, context.Metric], passing: context.Context
) -> tf.Tensor:
    """Returns what a pass adds to the loss of the batch that it computes a part of.

    Args:
      loss: the loss that the task returned. The reports in it are shares already.
    """
    if passing.batch_weights is None:
        return loss
    included = tf.add_n([0.0, *passing.included])
    own = loss_weights(passing, metrics)[OWN_LOSS]
    share = tf.math.divide_no_nan(own, passing.batch_weights[OWN_LOSS])
    return included + (loss - included) * share


class Measured(Protocol):
    """A part of the state with arrays that layers read beside the weights, and measure in a step.

    `joined` makes the tree that layers read, and `parted` is its inverse.
    """

    name: ClassVar[str]
    beside: context.Beside

    def specs(self) -> NestedMap: ...

    def begin(self, theta: NestedMap) -> NestedMap: ...

    def joined(self, theta: NestedMap, own: NestedMap) -> NestedMap: ...

    def parted(self, theta: NestedMap, joined: list[tf.Tensor]) -> tuple[NestedMap, NestedMap]: ...


class Gradients:
    """Computes the loss, the metrics and the gradients of a task's weights.

    Attributes:
      accumulate: computes a batch in parts; None computes it at once.
      around: opens a context around each pass on a part of a batch. A service sets it before the
        first step is traced.
    """

    around: Callable[[TensorBatch], contextlib.AbstractContextManager[object]]

    def __init__(
        self,
        task: Task,
        precision: Precision,
        theta_specs: NestedMap,
        frozen: Collection[str],
        measured: Measured | None = None,
        accumulate: AccumulateGradients | None = None,
    ):
        """Takes what all steps have in common.

        Args:
          frozen: paths of the weights that are not trained.
          measured: what steps measure beside the weights, if there is anything.
          accumulate: computes a batch in parts; None computes it at once.
        """
        self._task, self._precision, self._theta_specs = task, precision, theta_specs
        self._frozen, self._measured = frozen, measured
        self.accumulate = accumulate
        self.around = lambda _: contextlib.nullcontext()
        # The weights, and what is measured beside them, as layers read them in a step.
        self._specs = self._joined(theta_specs, measured.specs() if measured else None)

    @property
    def gathers_ahead(self) -> bool:
        """Whether loops over layers gather weights one layer ahead; see `context.Context`.

        With several micro-batches they do not, since each would gather all weights again.
        """
        return self._precision.has_master_weights and self.accumulate is None

    def context(self, key: tf.Tensor) -> context.Context:
        """Returns the context of a forward pass, whose random numbers an int32 key [2] seeds."""
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
    ) -> LossAndGradients:
        """Returns the training loss, the metrics and the gradients of the weights.

        Gradients of frozen weights are not computed, and are 0. If `own_measured` is
        given, what the pass measures for it is the entry of the gradients of the part's name.

        Args:
          batch: feature name -> tensor.
          key: int32 [2], seeds the random numbers.
          on_output: called with each layer's output in forward order, as in `context.scope`.
          scale: a float32 scalar that multiplies the loss in the backward pass. The returned
            gradients are divided by it.
          on_result: called with the results of each layer, as in `context.Context`.
          own_measured: the measured part of the state; by default the one before the first step.
        """
        measured = self._measured
        own = (own_measured or measured.begin(theta)) if measured else None
        ahead = self.gathers_ahead
        weights = self._precision.layer_weights(self._theta_specs, theta, gathers_ahead=ahead)
        weights = self._joined(weights, own)
        passing = dataclasses.replace(
            self.context(key),
            on_output=on_output,
            on_result=on_result,
            beside=measured.beside if measured else None,
            gathers_ahead=ahead,
        )
        if self.accumulate is None:
            loss, metrics, gradients = self._of_part(weights, batch, passing, scale)
        else:
            found = self._of_parts(self.accumulate, weights, batch, passing, scale)
            loss, metrics, gradients = found
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
    ) -> LossAndGradients:
        """Returns loss, metrics and gradients of one pass, as a part of a batch adds them up."""
        trained = self._trained(theta)
        with context.use(passing) as scope, self.around(batch), tf.GradientTape() as tape:
            tape.watch(trained.flatten())
            weights = stop_frozen(self._specs.flatten(), theta.flatten())
            loss, metrics = self._task.loss(theta.pack(weights), batch)
            loss = share_of_loss(loss, metrics, scope)
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
        accumulate: AccumulateGradients,
        theta: NestedMap,
        batch: TensorBatch,
        passing: context.Context,
        scale: tf.Tensor | None,
    ) -> LossAndGradients:
        def compute(part: TensorBatch, key: tf.Tensor, weights: LossWeights) -> LossAndGradients:
            now = dataclasses.replace(passing.part(), seed=key, batch_weights=weights)
            return self._of_part(theta, part, now, scale)

        def weigh(part: TensorBatch, key: tf.Tensor) -> LossWeights:
            unobserved = dataclasses.replace(
                passing.part(), seed=key, on_output=None, on_result=None
            )
            with context.use(unobserved) as now, self.around(part):
                return loss_weights(now, self._task.loss(theta, part)[1])

        assert passing.seed is not None
        return accumulate(compute, weigh, batch, passing.seed, self._trained(self._specs))
