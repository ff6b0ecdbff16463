"""Loop: a segment of a forward pass run several times in one tf.while_loop, and back in another.

The segment is a function of (x, *fixed, *weights): what is carried on, what every time through it
reads alike, and stacks of weights of which each time reads its slice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_gshard.core.gradients import custom_gradient
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.repetition import Iteration, Repetition
from lingvo_gshard.core.segment import Reports, Segment
from lingvo_gshard.sharding import annotate, annotate_like

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A loop's output, and what was reported: values are stacked over the times through it."""

    output: tf.Tensor
    reports: Reports
    values: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """What one time through a segment reports and keeps: names, layouts, shapes and types."""

    reports: Reports
    values: list[tf.TensorSpec]
    kept: list[tf.TensorSpec]
    kept_layouts: list[str]


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs a segment `repetition.times` times.

    carried: the layout of x. weights: of one time through the segment, without R.
    """

    segment: Segment
    repetition: Repetition
    carried: str
    weights: Sequence[VariableSpec]

    def run(self, *tensors: tf.Tensor) -> Outcome:
        """Returns the outcome; TensorFlow keeps for the gradient whatever that needs."""
        traced = self._trace(tensors)
        x, values, _ = self._forward(tensors, traced, keep=False)
        return Outcome(x, traced.reports, values)

    def run_rematerialised(self, *tensors: tf.Tensor) -> Outcome:
        """Returns the outcome; the gradient runs the segment again, time by time, last one first.

        Kept in between are the input of each time and the products that the segment's policy names.
        """
        traced = self._trace(tensors)

        @custom_gradient
        def compute(*tensors: tf.Tensor):
            x, values, kept = self._forward(tensors, traced, keep=True)

            def gradient(dx: tf.Tensor, *d_values: tf.Tensor) -> list[tf.Tensor | None]:
                return self._backward(tensors, kept, dx, d_values)

            return (x, *values), gradient

        x, *values = compute(*tensors)
        return Outcome(x, traced.reports, values)

    def _trace(self, tensors: Tensors) -> _Traced:
        traced = []

        def once(*tensors: tf.Tensor) -> tf.Tensor:
            output, reports, kept = self.segment.forward(tensors, self._iteration(tf.constant(0)))
            specs = [spec_of(x) for x in reports.values], [spec_of(x) for x in kept.results]
            traced.append(_Traced(reports, *specs, kept.layouts))
            return output

        fixed = self._fixed(tensors)
        alike, sliced = tensors[: 1 + fixed], tensors[1 + fixed :]
        _trace_aside(once, [spec_of(t) for t in alike] + [_slice_spec(stack) for stack in sliced])
        return traced[-1]

    def _forward(
        self, tensors: Tensors, traced: _Traced, keep: bool
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Returns the output and, stacked, the reports' values and what is kept, inputs first."""
        specs = [*traced.values, *([spec_of(tensors[0]), *traced.kept] if keep else [])]

        def body(r: tf.Tensor, x: tf.Tensor, stacks: list) -> tuple:
            output, reports, kept = self.segment.forward(
                self._at(r, x, tensors), self._iteration(r)
            )
            results = [*reports.values, *([x, *kept.results] if keep else [])]
            stacks = [stack.write(r, y) for stack, y in zip(stacks, results, strict=True)]
            return r + 1, output, stacks

        stacks = [self._stack_of(spec) for spec in specs]
        _, output, stacks = self._while(body, (tf.constant(0), tensors[0], stacks))
        values = [stack.stack() for stack in stacks]
        reported = len(traced.values)
        layouts = [self.carried, *traced.kept_layouts] if keep else []
        kept = [
            annotate(value, f"R{layout}")
            for value, layout in zip(values[reported:], layouts, strict=True)
        ]
        return output, values[:reported], kept

    def _backward(
        self, tensors: Tensors, kept: Tensors, dx: tf.Tensor, d_values: Tensors
    ) -> list[tf.Tensor | None]:
        """Returns the gradients of the loop's tensors; None for those that nothing depends on."""

        fixed = self._fixed(tensors)
        # Of a loop that is run once XLA makes a part of the program around it.
        hidden = 1 + fixed if self.repetition.times == 1 else 0

        def once(r: tf.Tensor, dx: tf.Tensor) -> list[tf.Tensor | None]:
            x, *results = [read(stack, r) for stack in kept]
            upstream = [dx, *(read(d, r) for d in d_values)]
            dx, *gradients = self.segment.gradients(
                self._at(r, x, tensors), results, upstream, self._iteration(r), hidden
            )
            slices = map(_narrowed, gradients[fixed:], self.weights)
            return [dx, *gradients[:fixed], *slices]

        found = results_of(once, tf.TensorSpec([], tf.int32), spec_of(dx))
        alike = [i for i in found if 0 < i <= fixed]
        sliced = [i for i in found if i > fixed]

        def body(count: tf.Tensor, dx: tf.Tensor, sums: list, stacks: list) -> tuple:
            r = self.repetition.times - 1 - count
            gradients = once(r, dx)
            sums = [s + tf.cast(gradients[i], s.dtype) for s, i in zip(sums, alike, strict=True)]
            stacks = [s.write(r, gradients[i]) for s, i in zip(stacks, sliced, strict=True)]
            return count + 1, gradients[0], sums, stacks

        sums = [tf.zeros(tensors[i].shape, tf.float32) for i in alike]
        stacks = [self._stack_of(found[i]) for i in sliced]
        _, dx, sums, stacks = self._while(body, (tf.constant(0), dx, sums, stacks))
        gradients: list[tf.Tensor | None] = [None] * len(tensors)
        for i, value in [*zip(alike, sums, strict=True), *zip(sliced, stacks, strict=True)]:
            value = value.stack() if i > fixed else value
            gradients[i] = tf.cast(value, tensors[i].dtype)
        return [dx, *gradients[1:]]

    def _fixed(self, tensors: Tensors) -> int:
        """How many tensors every time reads alike."""
        return len(tensors) - 1 - len(self.weights)

    def _iteration(self, r: tf.Tensor) -> Iteration:
        return Iteration(self.repetition, r)

    def _at(self, r: tf.Tensor, x: tf.Tensor, tensors: Tensors) -> list[tf.Tensor]:
        """The segment's arguments at time r."""
        fixed = self._fixed(tensors)
        slices = [
            annotate_like(read(stack, r), spec)
            for stack, spec in zip(tensors[1 + fixed :], self.weights, strict=True)
        ]
        return [x, *tensors[1 : 1 + fixed], *slices]

    def _stack_of(self, spec: tf.TensorSpec) -> tf.TensorArray:
        return tf.TensorArray(spec.dtype, self.repetition.times, element_shape=spec.shape)

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


def _trace_aside(function: Callable, specs: Sequence[tf.TensorSpec]) -> None:
    """Traces a function into a graph of its own, to see what it does."""
    tf.function(function, autograph=False).get_concrete_function(*specs)


def results_of(function: Callable[..., list], *specs: tf.TensorSpec) -> dict[int, tf.TensorSpec]:
    """Shape and type of a function's results, those that there are, by their place."""
    found: dict[int, tf.TensorSpec] = {}

    def traced(*tensors: tf.Tensor) -> list:
        results = function(*tensors)
        found.update((i, spec_of(x)) for i, x in enumerate(results) if x is not None)
        return [result for result in results if result is not None]

    _trace_aside(traced, specs)
    return found


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
