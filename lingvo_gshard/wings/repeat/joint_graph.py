"""JointGraph: a function and its gradient traced as one graph, split into forward and backward.

TensorFlow's gradient of a loop saves every tensor that it reads, including copies of the weights.
JointGraph saves the tensors that a minimum cut of the graph chooses, and recomputes the others in
the backward pass. PyTorch does the same for compiled functions:
https://pytorch.org/functorch/stable/notebooks/aot_autograd_optimizations.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lingvo_gshard.core import RECOMPUTED_SCOPE, tf
from lingvo_gshard.wings.repeat import minimum_cut, subgraph
from lingvo_gshard.wings.repeat.minimum_cut import RematCosts

Tensors: TypeAlias = "Sequence[tf.Tensor]"
Gradients: TypeAlias = "list[tf.Tensor | None]"


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """A traced function and its gradient.

    All tensors except the outer ones of `captured` belong to the traced graph.

    Attributes:
      forward_inputs: Inputs that are available in the forward pass only, such as activations.
      shared_inputs: Inputs that are available in both passes, such as weights.
      output_gradients: Placeholders for the gradients of the outputs.
      gradients: Gradients of the forward inputs, then of the shared inputs. None for an input that
        no output depends on.
      captured: (outer, inner) pairs of the tensors that the function captures.
      saved: Tensors that the forward pass saves for the backward pass.
    """

    forward_inputs: Tensors
    shared_inputs: Tensors
    outputs: Tensors
    output_gradients: Tensors
    gradients: Gradients
    captured: Sequence[tuple[tf.Tensor, tf.Tensor]]
    saved: Tensors

    @classmethod
    def trace(
        cls,
        function: Callable[..., Tensors],
        forward_specs: Sequence[tf.TensorSpec],
        shared_specs: Sequence[tf.TensorSpec],
        make_costs: Callable[[Sequence[tf.Operation]], RematCosts],
        finish_gradients: Callable[[Gradients], Gradients] = list,
    ) -> JointGraph:
        """Traces a function and chooses the tensors to save.

        Args:
          function: Takes the forward inputs, then the shared inputs.
          forward_specs: Specs of the inputs that are available in the forward pass only.
          shared_specs: Specs of the inputs that are available in both passes.
          make_costs: Called with the operations of the forward inputs, after the function was
            traced. Returns the costs of saving and recomputing.
          finish_gradients: Maps the gradients to the results of the graph, for example to annotate
            them.
        """
        traced = []

        def forward_and_backward(*inputs: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                tape.watch([x for x in inputs if x.dtype.is_floating])
                outputs = function(*inputs)
            upstream = [tf.raw_ops.Placeholder(dtype=y.dtype, shape=y.shape) for y in outputs]
            found = tape.gradient(outputs, inputs, output_gradients=upstream)
            dense = [None if g is None else tf.convert_to_tensor(g) for g in found]
            traced.append((inputs, outputs, upstream, finish_gradients(dense)))

        concrete = tf.function(forward_and_backward, autograph=False).get_concrete_function(
            *forward_specs, *shared_specs
        )
        graph, (inputs, outputs, upstream, gradients) = concrete.graph, traced[-1]
        forward_inputs = inputs[: len(forward_specs)]
        input_operations = [x.op for x in forward_inputs]
        costs = make_costs(input_operations)
        needed = subgraph.ancestors(g for g in gradients if g is not None)
        # Constants are computed in both passes. In a manual region they are no shards, so that
        # a saved one could not be read there.
        needed &= subgraph.dependents([*inputs, *upstream, *(x for _, x in graph.captures)])
        saved = minimum_cut.tensors_to_save(
            [operation for operation in graph.get_operations() if operation in needed],
            input_operations,
            subgraph.dependents(upstream),
            costs.save_cost,
            costs.recompute_cost,
        )
        shared_inputs = inputs[len(forward_specs) :]
        captured = graph.captures
        return cls(forward_inputs, shared_inputs, outputs, upstream, gradients, captured, saved)

    @property
    def graph(self) -> tf.Graph:
        """The graph of the traced function."""
        return self.outputs[0].graph

    def forward(self, forward_inputs: Tensors, shared: Tensors) -> tuple[list[tf.Tensor], Tensors]:
        """Runs the forward pass in the current graph. Returns outputs and tensors to save."""
        known = self._known_in_both(shared) | _by_name(self.forward_inputs, forward_inputs)
        results = subgraph.copy_into_current_graph([*self.outputs, *self.saved], known)
        return results[: len(self.outputs)], results[len(self.outputs) :]

    def backward(self, shared: Tensors, saved: Tensors, output_gradients: Tensors) -> Gradients:
        """Runs the backward pass in the current graph, on tensors that `forward` saved.

        Operations of the forward pass that it repeats are named `rematerialized/...`. Returns the
        gradients of the forward inputs, then of the shared inputs.
        """
        known = self._known_in_both(shared) | _by_name(self.saved, saved)
        known |= _by_name(self.output_gradients, output_gradients)
        backward_only = subgraph.dependents(self.output_gradients)
        results = iter(
            subgraph.copy_into_current_graph(
                [gradient for gradient in self.gradients if gradient is not None],
                known,
                lambda operation: "" if operation in backward_only else f"{RECOMPUTED_SCOPE}/",
            )
        )
        return [None if gradient is None else next(results) for gradient in self.gradients]

    def _known_in_both(self, shared: Tensors) -> dict[str, tf.Tensor]:
        captured = {inner.name: outer for outer, inner in self.captured}
        return captured | _by_name(self.shared_inputs, shared)


def _by_name(tensors: Tensors, values: Tensors) -> dict[str, tf.Tensor]:
    return {x.name: value for x, value in zip(tensors, values, strict=True)}
