"""Segment: a part of a forward pass that can be computed again to find its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.barrier import optimization_barrier
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.autodiff.remat_policy import Kept
from lingvo_gshard.core.repetition import Iteration, Repetition

Function = Callable[..., tf.Tensor]


@dataclasses.dataclass
class Reports:
    """What layers left behind in the context: names of losses and metrics, and their values."""

    losses: list[str]
    metrics: list[str]
    values: list[tf.Tensor] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, collected: context.Context) -> Reports:
        """Returns what a context has collected; values: losses, then metrics, then weights."""
        metrics = list(collected.metrics.values())
        values = [*collected.losses.values(), *(v for v, _ in metrics), *(w for _, w in metrics)]
        return cls(list(collected.losses), list(collected.metrics), values)

    def stacked(self, repetition: Repetition) -> Reports:
        """Returns these, of a repetition's body, with names for the values of all times."""
        rename = repetition.stacked
        return Reports(list(map(rename, self.losses)), list(map(rename, self.metrics)))

    def add_to(self, target: context.Context, values: Sequence[tf.Tensor]) -> None:
        """Reports values of these names to a context, and of losses that are stacked the sum."""
        losses, metrics = len(self.losses), len(self.metrics)
        for name, value in zip(self.losses, values[:losses], strict=True):
            target.add_loss(name, tf.reduce_sum(value))
        pairs = zip(
            self.metrics, values[losses : losses + metrics], values[losses + metrics :], strict=True
        )
        for name, value, weight in pairs:
            target.add_metric(name, value, weight)


class Segment:
    """A function of tensors and of the context it was made in.

    What it computes the second time has the same random numbers as the first, and name scopes that
    begin with `rematerialized/`.
    """

    def __init__(self, function: Function, policy: str):
        self.policy, self._function = policy, function
        self._context, self._path = context.current(), context.layer_path()

    def forward(
        self, tensors: Sequence[tf.Tensor], iteration: Iteration | None = None
    ) -> tuple[tf.Tensor, Reports, Kept]:
        """Returns the function's output, what layers reported in it, and the products kept."""
        kept = Kept(self.policy)
        with context.use(self._context.part(iteration)) as part, kept.recorded():
            output = self._function(*tensors)
        return output, Reports.of(part), kept

    def gradients(
        self,
        tensors: Sequence[tf.Tensor],
        kept: Sequence[tf.Tensor],
        upstream: Sequence[tf.Tensor],
        iteration: Iteration | None = None,
        hidden: int = 0,
    ) -> list[tf.Tensor | None]:
        """Returns the gradients of the tensors; None for those that nothing depends on.

        kept: results of the products that `forward` kept. upstream: gradients of the output and of
        the reports' values. hidden: how many tensors are put behind a barrier, without which XLA
        would see in one program the same computed twice, and keep the first result.
        """
        if hidden:
            shown, upstream = optimization_barrier(tensors[:hidden], upstream)
            tensors = [*shown, *tensors[hidden:]]
        with tf.GradientTape() as tape:
            tape.watch([t for t in tensors if t.dtype.is_floating])
            with (
                context.use(self._context.part(iteration)) as part,
                context.layer(self._path),
                context.recomputation(),
                Kept(self.policy).replayed(kept),
            ):
                output = self._function(*tensors)
            outputs = [output, *Reports.of(part).values]
        return tape.gradient(outputs, list(tensors), output_gradients=list(upstream))


def rematerialized(
    function: Function, policy: str, activations: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Returns function(*activations, *weights), of which a policy says what is computed again."""
    segment = Segment(function, policy)
    reports: list[Reports] = []

    @custom_gradient
    def compute(*tensors: tf.Tensor):
        output, left_behind, kept = segment.forward(tensors)
        reports[:] = [left_behind]

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            return segment.gradients(tensors, kept.results, upstream, hidden=len(activations))

        return (output, *left_behind.values), gradient

    output, *values = compute(*activations, *weights)
    reports[0].add_to(context.current(), values)
    return output
