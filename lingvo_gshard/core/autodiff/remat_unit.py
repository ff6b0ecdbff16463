"""RematUnit: a part of the forward pass that the backward pass recomputes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, cast

import numpy as np

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient, optimization_barrier
from lingvo_gshard.core.autodiff.remat_policy import SavedProducts, is_offloaded
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.memory_kinds import to_device, to_host
from lingvo_gshard.core.repetition import Iteration, Repetition

Function: TypeAlias = "Callable[..., tf.Tensor]"


def saving(products: SavedProducts) -> contextlib.AbstractContextManager:
    """Saves the products that are computed inside a `with` block."""
    return context.override(saved_products=products)


@contextlib.contextmanager
def restoring(products: SavedProducts, results: Sequence[tf.Tensor]) -> Iterator[None]:
    """Replaces products inside a `with` block by results that were saved before, in order."""
    with products.giving(results), context.override(saved_products=products):
        yield


@dataclasses.dataclass
class Reports:
    """The losses, metrics and sums that layers reported in a part of the forward pass.

    Attributes:
      values: Values and weights of the losses, values and weights of the metrics, then sums. A
        loss that is a sum has the weight 1.
      summed_losses: Names of the losses that are sums; see `context.Context.add_loss`.
    """

    losses: list[str]
    metrics: list[str]
    sums: list[str]
    values: list[tf.Tensor] = dataclasses.field(default_factory=list)
    summed_losses: frozenset[str] = frozenset()

    @classmethod
    def of(cls, collected: context.Context) -> Reports:
        """Returns the losses, metrics and sums that a context has collected."""
        metrics, weights = list(collected.metrics.values()), collected.loss_weights.values()
        values = [
            *collected.losses.values(),
            # All iterations of a loop over layers have the same tokens.
            *(tf.ones([]) if weight is None else tf.reduce_mean(weight) for weight in weights),
            *(value for value, _ in metrics),
            *(weight for _, weight in metrics),
            *collected.sums.values(),
        ]
        return cls(
            list(collected.losses),
            list(collected.metrics),
            list(collected.sums),
            values,
            frozenset(name for name, w in collected.loss_weights.items() if w is None),
        )

    def stacked(self, repetition: Repetition) -> Reports:
        """Returns the same reports under names for the stacked values of all iterations."""
        names = (self.losses, self.metrics, self.sums)
        losses, metrics, sums = (list(map(repetition.stacked, part)) for part in names)
        summed = frozenset(map(repetition.stacked, self.summed_losses))
        return Reports(losses, metrics, sums, summed_losses=summed)

    def add_to(self, target: context.Context, values: Sequence[tf.Tensor]) -> None:
        """Adds values to a context under the names of these reports.

        Args:
          values: Ordered as in `self.values`. The entries of a stacked loss are summed.
        """
        losses, loss_weights, means, weights, sums = self.split(values)
        for name, value, weight in zip(self.losses, losses, loss_weights, strict=True):
            target.add_loss(name, value, None if name in self.summed_losses else weight)
        for name, value, weight in zip(self.metrics, means, weights, strict=True):
            target.add_metric(name, value, weight)
        for name, value in zip(self.sums, sums, strict=True):
            target.add_sum(name, value)

    def split(self, values: Sequence[tf.Tensor]) -> tuple[Sequence[tf.Tensor], ...]:
        """Returns the five kinds of values, each in the order of its names.

        Args:
          values: Ordered as in `self.values`.
        """
        kinds = (self.losses, self.losses, self.metrics, self.metrics, self.sums)
        ends = np.cumsum([len(names) for names in kinds])
        return tuple(values[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


class RematUnit:
    """A function of tensors that runs in the forward pass and again in the backward pass.

    Both runs use the context that was current when the unit was made. They therefore draw the same
    random numbers. Name scopes of the second run begin with `rematerialized/`.

    Args:
      function: Maps tensors to one tensor.
      policy: Remat policy that selects the products to save, see remat_policy.py.
    """

    def __init__(self, function: Function, policy: str):
        self.policy, self._function = policy, function
        self._context = context.current()

    def forward(
        self, tensors: Sequence[tf.Tensor], iteration: Iteration | None = None
    ) -> tuple[tf.Tensor, Reports, SavedProducts]:
        """Runs the function. Returns output, reports of layers, and products that the policy saves.

        Args:
          iteration: Position in a compiled loop over layers, if the unit is its body.
        """
        saved = SavedProducts(self.policy)
        with context.use(self._context.part(iteration)) as part, saving(saved):
            output = self._function(*tensors)
        return output, Reports.of(part), saved

    def gradients(
        self,
        tensors: Sequence[tf.Tensor],
        saved: Sequence[tf.Tensor],
        upstream: Sequence[tf.Tensor],
        iteration: Iteration | None = None,
        barrier_count: int = 0,
    ) -> list[tf.Tensor | None]:
        """Recomputes the function and returns the gradients of its arguments.

        Args:
          saved: Results of the products that `forward` saved.
          upstream: Gradients of the output and of the reports' values.
          iteration: Position in a compiled loop over layers, if the unit is its body.
          barrier_count: Number of leading arguments that pass through an optimization barrier.
            Without it XLA would see the same computation twice and keep the first result.

        Returns:
          One gradient for each argument; None for an argument that no output depends on.
        """
        if barrier_count:
            passed, upstream = optimization_barrier(tensors[:barrier_count], upstream)
            tensors = [*passed, *tensors[barrier_count:]]
        with tf.GradientTape() as tape:
            tape.watch([t for t in tensors if t.dtype.is_floating])
            part = dataclasses.replace(self._context.part(iteration), is_recomputing=True)
            with context.use(part), restoring(SavedProducts(self.policy), list(saved)):
                output = self._function(*tensors)
            outputs = [output, *Reports.of(part).values]
        gradients = tape.gradient(outputs, list(tensors), output_gradients=list(upstream))
        # TensorFlow's type stubs have no None here.
        return cast(list[tf.Tensor | None], gradients)


def rematerialized(
    function: Function, policy: str, activations: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Returns function(*activations, *weights), recomputed in the backward pass."""
    unit = RematUnit(function, policy)
    reports: list[Reports] = []

    @custom_gradient
    def compute(*tensors: tf.Tensor):
        output, collected, saved = unit.forward(tensors)
        reports[:] = [collected]
        # The first argument is a layer's input. All layers share the others.
        kept = _between_passes(policy, [tensors[0], *saved.results])

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            first, *results = kept()
            arguments = [first, *tensors[1:]]
            return unit.gradients(arguments, results, upstream, barrier_count=len(activations))

        return (output, *collected.values), gradient

    output, *values = compute(*activations, *weights)
    reports[0].add_to(context.current(), values)
    return output


def _between_passes(policy: str, tensors: Sequence[tf.Tensor]) -> Callable[[], Sequence[tf.Tensor]]:
    """Keeps tensors for the backward pass, which gets them by calling the result."""
    if not is_offloaded(policy):
        return lambda: tensors
    on_host = [to_host(tensor) for tensor in tensors]
    return lambda: [to_device(tensor) for tensor in on_host]
