"""Loop: a segment of a forward pass run several times in one tf.while_loop, and back in another.

The segment is a function of (x, *fixed, *weights): what is carried on, what every time through it
reads alike, and stacks of weights of which each time reads its slice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gshard.core.autodiff import remat_policy
from lingvo_gshard.core.autodiff.barrier import optimization_barrier
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.autodiff.joint_graph import JointGraph
from lingvo_gshard.core.autodiff.remat_costs import MemoryCosts, RematCosts, TimeCosts
from lingvo_gshard.core.autodiff.remat_policy import SavedProducts
from lingvo_gshard.core.autodiff.remat_unit import RematUnit, Reports
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.repetition import Iteration, Repetition
from lingvo_gshard.sharding import annotate, annotate_like, recording

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A loop's output, and what was reported: values are stacked over the times through it."""

    output: tf.Tensor
    reports: Reports
    values: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """One time through a segment: its graph, what it reports, the layouts of what is kept."""

    joint: JointGraph
    reports: Reports
    layouts: list[str | None]


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs a segment `repetition.times` times.

    carried: the layout of x. weights: of one time through the segment, without R.
    """

    unit: RematUnit
    repetition: Repetition
    carried: str
    weights: Sequence[VariableSpec]

    def run(self, *tensors: tf.Tensor) -> Outcome:
        """Returns the outcome; the gradient is a loop, too, last time first.

        For it are kept, of each time, tensors that the segment's policy lets be kept: those that
        are cheapest in all, with what is computed again from them. Weights are read again.
        """
        traced = self._trace(tensors)

        @custom_gradient
        def compute(*tensors: tf.Tensor):
            x, values, kept = self._forward(tensors, traced)

            def gradient(dx: tf.Tensor, *d_values: tf.Tensor) -> list[tf.Tensor | None]:
                return self._backward(tensors, traced.joint, kept, dx, d_values)

            return (x, *values), gradient

        x, *values = compute(*tensors)
        return Outcome(x, traced.reports, values)

    def _trace(self, tensors: Tensors) -> _Traced:
        seen: list[tuple[Reports, SavedProducts]] = []

        def once(*tensors_and_r: tf.Tensor) -> Tensors:
            *tensors, r = tensors_and_r
            output, reports, kept = self.unit.forward(tensors, Iteration(self.repetition, r))
            seen.append((reports, kept))
            return [output, *reports.values]

        def costs_of(passing: Collection[tf.Operation]) -> RematCosts:
            if self.unit.policy == remat_policy.NONE:
                return TimeCosts(passing)
            return MemoryCosts(passing, seen[-1][1].results)

        fixed = self._fixed(tensors)
        alike, sliced = tensors[1 : 1 + fixed], tensors[1 + fixed :]
        number = tf.TensorSpec([], tf.int32)
        staying = [*map(spec_of, alike), *map(_slice_spec, sliced), number]
        joint = JointGraph.trace(once, [spec_of(tensors[0])], staying, costs_of, self._with_marks)
        reports, products = seen[-1]
        layouts = dict(zip(map(id, products.results), products.layouts, strict=True))
        layouts[id(joint.forward_inputs[0])] = self.carried
        return _Traced(joint, reports, [layouts.get(id(x)) for x in joint.saved])

    def _with_marks(self, gradients: list[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """The gradients with those of the weights marked, and narrow where they can be."""
        *gradients, of_number = gradients
        others = len(gradients) - len(self.weights)
        narrowed = map(_narrowed, gradients[others:], self.weights)
        return [*gradients[:others], *narrowed, of_number]

    def _forward(
        self, tensors: Tensors, traced: _Traced
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Returns the output and, stacked, the reports' values and what is kept."""
        joint = traced.joint

        def body(r: tf.Tensor, x: tf.Tensor, stacks: list) -> tuple:
            (output, *values), kept = joint.forward([x], self._at(r, tensors))
            stacks = [s.write(r, y) for s, y in zip(stacks, [*values, *kept], strict=True)]
            return r + 1, output, stacks

        reported = joint.outputs[1:]
        stacks = [self._stack_of(x) for x in (*reported, *joint.saved)]
        _, output, stacks = self._while(body, (tf.constant(0), tensors[0], stacks))
        recording.add_loop(output, joint.graph)
        stacked = [stack.stack() for stack in stacks]
        kept = [
            stack if layout is None else annotate(stack, f"R{layout}")
            for stack, layout in zip(stacked[len(reported) :], traced.layouts, strict=True)
        ]
        return output, stacked[: len(reported)], kept

    def _backward(
        self, tensors: Tensors, joint: JointGraph, kept: Tensors, dx: tf.Tensor, d_values: Tensors
    ) -> list[tf.Tensor | None]:
        """Returns the gradients of the loop's tensors; None for those that nothing depends on."""
        fixed = self._fixed(tensors)
        if self.repetition.times == 1 and self.unit.policy != remat_policy.NONE:
            # XLA makes such a loop a part of the program around it, in which what is computed again
            # was computed before.
            tensors, kept, (dx,) = optimization_barrier(tensors, kept, [dx])

        def once(r: tf.Tensor, dx: tf.Tensor) -> list[tf.Tensor | None]:
            upstream = [dx, *(read(d, r) for d in d_values)]
            here = [read(stack, r) for stack in kept]
            return joint.backward(self._at(r, tensors), here, upstream)

        found = [i for i, gradient in enumerate(joint.gradients) if gradient is not None]
        alike = [i for i in found if 0 < i <= fixed]
        sliced = [i for i in found if i > fixed]

        def body(count: tf.Tensor, dx: tf.Tensor, sums: list, stacks: list) -> tuple:
            r = self.repetition.times - 1 - count
            gradients = once(r, dx)
            sums = [s + tf.cast(gradients[i], s.dtype) for s, i in zip(sums, alike, strict=True)]
            stacks = [s.write(r, gradients[i]) for s, i in zip(stacks, sliced, strict=True)]
            return count + 1, gradients[0], sums, stacks

        sums = [tf.zeros(tensors[i].shape, tf.float32) for i in alike]
        stacks = [self._stack_of(joint.gradients[i]) for i in sliced]
        _, dx, sums, stacks = self._while(body, (tf.constant(0), dx, sums, stacks))
        gradients: list[tf.Tensor | None] = [None] * len(tensors)
        for i, value in [*zip(alike, sums, strict=True), *zip(sliced, stacks, strict=True)]:
            value = value.stack() if i > fixed else value
            gradients[i] = tf.cast(value, tensors[i].dtype)
        return [dx, *gradients[1:]]

    def _fixed(self, tensors: Tensors) -> int:
        """How many tensors every time reads alike."""
        return len(tensors) - 1 - len(self.weights)

    def _at(self, r: tf.Tensor, tensors: Tensors) -> list[tf.Tensor]:
        """What is there at time r beside x."""
        fixed = self._fixed(tensors)
        slices = [
            annotate_like(read(stack, r), spec)
            for stack, spec in zip(tensors[1 + fixed :], self.weights, strict=True)
        ]
        return [*tensors[1 : 1 + fixed], *slices, r]

    def _stack_of(self, one: tf.Tensor) -> tf.TensorArray:
        return tf.TensorArray(one.dtype, self.repetition.times, element_shape=one.shape)

    def _while(self, body: Callable, start: tuple) -> Any:
        times = self.repetition.times
        return tf.while_loop(lambda count, *_: count < times, body, start, maximum_iterations=times)


def read(stack: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
    """One slice of a stack, of which XLA reads no more than that."""
    start = [r] + [0] * (stack.shape.rank - 1)
    return tf.squeeze(tf.slice(stack, start, [1, *stack.shape[1:]]), 0)


def spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _slice_spec(stack: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(stack.shape[1:], stack.dtype)


def _narrowed(gradient: tf.Tensor | None, spec: VariableSpec) -> tf.Tensor | None:
    """A weight's gradient, marked as the weight is.

    Where it was computed in a narrower type and made a wide one it is that of the narrower type: it
    says no less, and a stack of it takes half of the memory.
    """
    if gradient is None:
        return None
    if gradient.op.type == "Cast" and gradient.op.inputs[0].dtype.size < gradient.dtype.size:
        gradient = gradient.op.inputs[0]
    return annotate_like(gradient, spec)
