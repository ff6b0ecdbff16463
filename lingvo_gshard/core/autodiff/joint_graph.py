"""A function and its gradient as one graph, of which one part runs before and one later.

TensorFlow's own gradient of a loop keeps every tensor that it reads, copies of the weights among
them. Here a minimum cut of the graph says what is kept; the rest is computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_gshard.core.autodiff import graph_parts, minimum_cut
from lingvo_gshard.core.autodiff.save_costs import Costs
from lingvo_gshard.core.layer import RECOMPUTED

Tensors = Sequence[tf.Tensor]
Gradients = list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """A traced function, and how its gradients are computed from upstream ones.

    passing: inputs that are not there later. staying: those that are. gradients: of the inputs, the
    passing ones first; None for those that no output depends on. captured: pairs of a tensor around
    the function and the one in the graph. kept: what the later part reads of the first.
    """

    passing: Tensors
    staying: Tensors
    outputs: Tensors
    upstream: Tensors
    gradients: Gradients
    captured: Sequence[tuple[tf.Tensor, tf.Tensor]]
    kept: Tensors

    @classmethod
    def trace(
        cls,
        function: Callable[..., Tensors],
        passing: Sequence[tf.TensorSpec],
        staying: Sequence[tf.TensorSpec],
        costs_of: Callable[[Sequence[tf.Operation]], Costs],
        as_wanted: Callable[[Gradients], Gradients],
    ) -> JointGraph:
        """Traces a function of tensors of these specs.

        costs_of: called, after tracing, with the operations of the inputs that pass. as_wanted:
        makes of the gradients what is to be returned.
        """
        traced = []

        def both(*inputs: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                tape.watch([x for x in inputs if x.dtype.is_floating])
                outputs = function(*inputs)
            upstream = [tf.raw_ops.Placeholder(dtype=y.dtype, shape=y.shape) for y in outputs]
            found = tape.gradient(outputs, inputs, output_gradients=upstream)
            dense = [None if g is None else tf.convert_to_tensor(g) for g in found]
            traced.append((inputs, outputs, upstream, as_wanted(dense)))

        concrete = tf.function(both, autograph=False).get_concrete_function(*passing, *staying)
        graph, (inputs, outputs, upstream, gradients) = concrete.graph, traced[-1]
        gone = [x.op for x in inputs[: len(passing)]]
        costs = costs_of(gone)
        needed = graph_parts.needed_for(g for g in gradients if g is not None)
        kept = minimum_cut.kept_tensors(
            [operation for operation in graph.get_operations() if operation in needed],
            gone,
            graph_parts.depending_on(upstream),
            costs.keeping,
            costs.again,
        )
        return cls(
            inputs[: len(passing)],
            inputs[len(passing) :],
            outputs,
            upstream,
            gradients,
            graph.captures,
            kept,
        )

    @property
    def graph(self) -> tf.Graph:
        """The graph in which the function was traced."""
        return self.outputs[0].graph

    def forward(self, passing: Tensors, staying: Tensors) -> tuple[list[tf.Tensor], Tensors]:
        """Returns the outputs, and what is kept."""
        known = self._there(staying) | _by_name(self.passing, passing)
        results = graph_parts.compute([*self.outputs, *self.kept], known)
        return results[: len(self.outputs)], results[len(self.outputs) :]

    def backward(self, staying: Tensors, kept: Tensors, upstream: Tensors) -> Gradients:
        """Returns the gradients of the inputs."""
        known = self._there(staying) | _by_name(self.kept, kept)
        known |= _by_name(self.upstream, upstream)
        later = graph_parts.depending_on(self.upstream)
        results = iter(
            graph_parts.compute(
                [gradient for gradient in self.gradients if gradient is not None],
                known,
                lambda operation: "" if operation in later else f"{RECOMPUTED}/",
            )
        )
        return [None if gradient is None else next(results) for gradient in self.gradients]

    def _there(self, staying: Tensors) -> dict[str, tf.Tensor]:
        captured = {inside.name: outside for outside, inside in self.captured}
        return captured | _by_name(self.staying, staying)


def _by_name(tensors: Tensors, values: Tensors) -> dict[str, tf.Tensor]:
    return {x.name: value for x, value in zip(tensors, values, strict=True)}
