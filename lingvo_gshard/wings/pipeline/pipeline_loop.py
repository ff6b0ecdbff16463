"""PipelineLoop: the compiled loop of a pipeline. All stages compute in every tick.

The stages are the first dimension of a tensor, P. Micro-batches move on to the next stage by a
rotation along P. If P is split over devices, XLA compiles the rotation to a collective-permute (Xu
et al. 2021, arXiv 2105.04663, section 3.3).

    state [P,B,L,M]      input of each stage in the current tick
    store [m,P,B,L,M]    one entry for each micro-batch; only entries of the first stage are used

At the first stage, the store holds the micro-batches that wait to enter the pipeline, including
micro-batches that start another circulation, and finally the outputs. After each tick the results
rotate by one stage. The first stage stores the result of the last stage, and reads its next input
from the store.

An idle stage also computes a result, which is never read. Its gradient is zero.

What else stages read is in pipeline_operands.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lingvo_gshard.core import Iteration, Repetition, VariableSpec, custom_gradient, remat_unit, tf
from lingvo_gshard.sharding import (
    annotate,
    collectives,
    current_partitioning,
    parts_of,
    use_partitioning,
)
from lingvo_gshard.wings.pipeline.pipeline_operands import (
    MicroBatchOperand,
    Schedule,
    WeightOnce,
    WeightOperand,
)
from lingvo_gshard.wings.pipeline.vectorize import vectorize
from lingvo_gshard.wings.repeat.loop import read, spec_of

LOCAL_LETTERS = {"m": "micro-batches"}

Tensors: TypeAlias = "Sequence[tf.Tensor]"
STAGES = "P"
_STATE, _STORE = "PBLM", "mPBLM"


@dataclasses.dataclass(frozen=True)
class _TracedBody:
    """Specs of the reports, saved products and gradients of one run of the body by one stage."""

    reports: remat_unit.Reports
    values: list[tf.TensorSpec]
    saved: list[tf.TensorSpec]
    saved_layouts: list[str]
    with_gradient: list[int]


@dataclasses.dataclass(frozen=True)
class PipelineLoop:
    """Runs a body on all micro-batches in all stages.

    The body is a function of (x [B,L,M], *inputs, index of the micro-batch, *weights). It sees the
    rows of one micro-batch and the weights of one iteration.
    """

    body: remat_unit.RematUnit
    schedule: Schedule
    repetition: Repetition
    weight_specs: Sequence[VariableSpec]

    @property
    def per_tick(self) -> int:
        """Number of body runs per stage and tick."""
        return self.repetition.times // (self.schedule.stages * self.schedule.circulations)

    def run(
        self, x: tf.Tensor, inputs: Tensors, weights: Tensors
    ) -> tuple[tf.Tensor, remat_unit.Reports, list[tf.Tensor]]:
        """Runs the pipeline. Its gradient is a loop over the ticks in reverse order.

        For the gradient, each run of the body saves its input and the products that the policy
        names. The others are recomputed.

        Returns:
          The output [m,B,L,M], the names of the reported values, and the reported values,
          each [R,P]. R counts the runs of the body by a stage, idle ones included.
        """
        tensors = [x, *inputs, *weights]
        traced = self._trace(tensors)

        @custom_gradient
        def compute(*tensors: tf.Tensor):
            passes = _Passes(self, tensors, traced)
            output, values, saved = passes.forward()

            def gradient(d_output: tf.Tensor, *d_values: tf.Tensor) -> list[tf.Tensor | None]:
                return passes.backward(saved, d_output, d_values)

            return (output, *values), gradient

        output, *values = compute(*tensors)
        return output, traced.reports, values

    def body_arguments(
        self, x: tf.Tensor, micro_batch: tf.Tensor, operands: Tensors
    ) -> list[tf.Tensor]:
        """Returns the arguments of the body; `operands` are its inputs and weights."""
        inputs = len(operands) - len(self.weight_specs)
        return [x, *operands[:inputs], micro_batch, *operands[inputs:]]

    def body_gradients(self, *arguments: object) -> list[tf.Tensor | None]:
        """Returns the gradients of x and of the operands; for arguments see `RematUnit`."""
        gradients = self.body.gradients(*arguments)
        # The index of the micro-batch precedes the weights and has no gradient.
        del gradients[-1 - len(self.weight_specs)]
        return gradients

    def _trace(self, tensors: Tensors) -> _TracedBody:
        """Traces one run of the body in a graph of its own."""
        traced = []

        def run_once(x: tf.Tensor, *operands: tf.Tensor) -> list[tf.Tensor | None]:
            arguments = self.body_arguments(x, tf.constant(0), operands)
            iteration = Iteration(self.repetition, tf.constant(0))
            output, reports, saved = self.body.forward(arguments, iteration)
            specs = [[spec_of(y) for y in ys] for ys in (reports.values, saved.results)]
            traced.append((reports, *specs, saved.layouts))
            upstream = [tf.ones_like(y) for y in (output, *reports.values)]
            return self.body_gradients(arguments, saved.results, upstream, iteration)

        first_weight = len(tensors) - len(self.weight_specs)
        slices = [t[0] for t in tensors[:first_weight]] + [t[0, 0] for t in tensors[first_weight:]]
        partitioning = current_partitioning()
        with use_partitioning(partitioning and partitioning.within_stack(STAGES)):
            with_gradient = _present_results(run_once, *map(spec_of, slices))
        reports, values, results, layouts = traced[-1]
        return _TracedBody(reports, values, results, layouts, with_gradient)


class _Passes:
    """The forward and the backward pass of one call of a pipeline."""

    def __init__(self, loop: PipelineLoop, tensors: Tensors, traced: _TracedBody):
        self._loop, self._traced, self._schedule = loop, traced, loop.schedule
        self._x = tensors[0]
        first_weight = len(tensors) - len(loop.weight_specs)
        self._operands = [
            *(MicroBatchOperand(tensor, self._schedule) for tensor in tensors[1:first_weight]),
            *(
                self._kind_of_weights()(weight, spec, self._schedule, loop.per_tick)
                for weight, spec in zip(tensors[first_weight:], loop.weight_specs, strict=True)
            ),
        ]
        self._with_gradient = [self._operands[i - 1] for i in traced.with_gradient if i]
        self._is_first = tf.reshape(tf.range(self._schedule.stages), [-1, 1, 1, 1]) == 0

    def _kind_of_weights(self) -> type[WeightOperand]:
        """Returns how gradients of weights are added up.

        The gradients of a tick take memory, which only pays where devices share weights.
        """
        shares_weights = parts_of(_STATE)[1] > 1
        return WeightOnce if shares_weights and self._schedule.circulations == 1 else WeightOperand

    def forward(self) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Returns the output, the values of the reports and the saved tensors, both stacked."""
        ticks, per_tick = self._schedule.ticks, self._loop.per_tick
        values = len(self._traced.values)

        def tick(t: tf.Tensor, state: tf.Tensor, store: tf.TensorArray, stacks: list) -> tuple:
            def run_body(r: tf.Tensor, x: tf.Tensor, stacks: list) -> tuple:
                y, *results = self._compute(t, r, x)
                results.insert(values, x)
                run = t * per_tick + r
                pairs = zip(stacks, results, strict=True)
                return r + 1, annotate(y, _STATE), [s.write(run, result) for s, result in pairs]

            _, y, stacks = _loop(per_tick, run_body, (tf.constant(0), state, stacks))
            moved = annotate(collectives.rotated(y, 0), _STATE)
            index, has_left = self._leaving(t)
            store = store.write(index, tf.where(has_left, moved, store.read(index)))
            state = tf.where(self._is_first, store.read(self._entering(t)), moved)
            return t + 1, annotate(state, _STATE), store, stacks

        specs = [*self._traced.values, spec_of(self._x[0]), *self._traced.saved]
        stacks = [self._stack_of(spec) for spec in specs]
        store = self._store_of(self._x, at_all_stages=True)
        start = (tf.constant(0), annotate(store.read(0), _STATE), store, stacks)
        _, _, store, stacks = _loop(ticks, tick, start)
        stacked = [stack.stack() for stack in stacks]
        layouts = ["BLM", *self._traced.saved_layouts]
        saved = [
            annotate(stack, f"R{STAGES}{layout}", unsplit="R")
            for stack, layout in zip(stacked[values:], layouts, strict=True)
        ]
        return self._at_first_stage(store), stacked[:values], saved

    def backward(
        self, saved: Tensors, d_output: tf.Tensor, d_values: Tensors
    ) -> list[tf.Tensor | None]:
        """Returns the gradients of the loop's arguments; None if no output depends on one."""
        ticks, per_tick = self._schedule.ticks, self._loop.per_tick

        def tick(count: tf.Tensor, d_state: tf.Tensor, d_store: tf.TensorArray, sums: list):
            t = ticks - 1 - count
            dy, d_store = self._gradient_of_moves(t, d_state, d_store)

            def run_body(done: tf.Tensor, dy: tf.Tensor, totals: list) -> tuple:
                r = per_tick - 1 - done
                run = t * per_tick + r
                results = [read(stack, run) for stack in (*saved, *d_values)]
                dx, *gradients = self._gradients(t, r, dy, results)
                triples = zip(self._with_gradient, totals, gradients, strict=True)
                totals = [operand.add(total, t, r, d) for operand, total, d in triples]
                return done + 1, annotate(dx, _STATE), totals

            operands = self._with_gradient
            totals = [each.begin_tick(total) for each, total in zip(operands, sums, strict=True)]
            _, dx, totals = _loop(per_tick, run_body, (tf.constant(0), dy, totals))
            triples = zip(operands, sums, totals, strict=True)
            return count + 1, dx, d_store, [each.end_tick(s, total) for each, s, total in triples]

        sums = [operand.zero_sums() for operand in self._with_gradient]
        d_state = annotate(
            tf.zeros([self._schedule.stages, *self._x[0].shape], self._x.dtype), _STATE
        )
        d_store = self._store_of(d_output, at_all_stages=False)
        _, d_state, d_store, sums = _loop(ticks, tick, (tf.constant(0), d_state, d_store, sums))
        d_store = d_store.write(0, d_store.read(0) + d_state)
        gradients: list[tf.Tensor | None] = [None] * (1 + len(self._operands))
        gradients[0] = self._at_first_stage(d_store)
        pairs = zip(self._with_gradient, sums, strict=True)
        indices = filter(None, self._traced.with_gradient)
        for i, (operand, total) in zip(indices, pairs, strict=True):
            gradients[i] = operand.gradient(total)
        return gradients

    def _gradient_of_moves(
        self, t: tf.Tensor, d_state: tf.Tensor, d_store: tf.TensorArray
    ) -> tuple[tf.Tensor, tf.TensorArray]:
        """Returns the gradients of the results of tick t and of the store before the rotation."""
        entering, (leaving, has_left) = self._entering(t), self._leaving(t)
        zero = tf.zeros([], d_state.dtype)
        d_entered = tf.where(self._is_first, d_state, zero)
        d_store = d_store.write(entering, d_store.read(entering) + d_entered)
        d_stored = d_store.read(leaving)
        d_moved = tf.where(self._is_first, zero, d_state)
        d_moved += tf.where(has_left, d_stored, zero)
        d_store = d_store.write(leaving, tf.where(has_left, zero, d_stored))
        d_moved = annotate(d_moved, _STATE)
        return annotate(collectives.rotated(d_moved, 0, -1), _STATE), d_store

    def _compute(self, t: tf.Tensor, r: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
        """Returns the outputs, the values of the reports and the saved products, each [P,...]."""
        loop = self._loop

        def stage(index: tf.Tensor, micro_batch: tf.Tensor, x: tf.Tensor, *operands: tf.Tensor):
            arguments = loop.body_arguments(x, micro_batch, operands)
            iteration = Iteration(loop.repetition, index)
            output, reports, saved = loop.body.forward(arguments, iteration)
            return [output, *reports.values, *saved.results]

        return vectorize(STAGES, stage, *self._indices(t, r), x, *self._read(t, r))

    def _gradients(
        self, t: tf.Tensor, r: tf.Tensor, dy: tf.Tensor, results: Tensors
    ) -> list[tf.Tensor]:
        """Returns the gradients of x and of the operands, each [P,...], of run r in tick t.

        `results` has x, the saved products, and the gradients of the values of the reports.
        """
        loop, saved, count = self._loop, len(self._traced.saved), len(self._operands)

        def stage(index: tf.Tensor, micro_batch: tf.Tensor, dy: tf.Tensor, *rest: tf.Tensor):
            operands, (x, *results) = rest[:count], rest[count:]
            arguments = loop.body_arguments(x, micro_batch, operands)
            upstream = [dy, *results[saved:]]
            iteration = Iteration(loop.repetition, index)
            gradients = loop.body_gradients(arguments, results[:saved], upstream, iteration)
            return [gradients[i] for i in self._traced.with_gradient]

        return vectorize(STAGES, stage, *self._indices(t, r), dy, *self._read(t, r), *results)

    def _indices(self, t: tf.Tensor, r: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns each stage's iteration of the body and its micro-batch, both int32 [P]."""
        schedule = self._schedule
        chunk = schedule.circulation(t) * schedule.stages + tf.range(schedule.stages)
        return chunk * self._loop.per_tick + r, schedule.micro_batch(t)

    def _read(self, t: tf.Tensor, r: tf.Tensor) -> list[tf.Tensor]:
        return [operand.read(t, r) for operand in self._operands]

    def _leaving(self, t: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the index of the micro-batch that leaves the last stage, and whether one does."""
        number = t + 1 - self._schedule.stages
        return tf.math.floormod(number, self._schedule.micro_batches), number >= 0

    def _entering(self, t: tf.Tensor) -> tf.Tensor:
        """Returns the index of the micro-batch that enters after tick t; arbitrary if none does."""
        return tf.math.floormod(t + 1, self._schedule.micro_batches)

    def _store_of(self, x: tf.Tensor, at_all_stages: bool) -> tf.TensorArray:
        """Returns a store that holds x [m,B,L,M] at the first stage, and else x or zeros."""
        count, *shape = x.shape
        shape = [self._schedule.stages, *shape]
        stored = tf.broadcast_to(x[:, None], [count, *shape])
        if not at_all_stages:
            stored = tf.where(self._is_first, stored, tf.zeros([], x.dtype))
        array = tf.TensorArray(x.dtype, count, element_shape=shape, clear_after_read=False)
        return array.unstack(annotate(stored, _STORE))

    def _at_first_stage(self, store: tf.TensorArray) -> tf.Tensor:
        """Returns the entries of the store at the first stage, [m,B,L,M]."""
        return annotate(store.stack(), _STORE)[:, 0]

    def _stack_of(self, spec: tf.TensorSpec) -> tf.TensorArray:
        runs = self._schedule.ticks * self._loop.per_tick
        shape = [self._schedule.stages, *spec.shape]
        return tf.TensorArray(spec.dtype, runs, element_shape=shape)


def _loop(times: int, body: Callable, start: tuple) -> tuple:
    if times == 1:
        return body(*start)
    return tf.while_loop(lambda count, *_: count < times, body, start, maximum_iterations=times)


def _present_results(function: Callable[..., list], *specs: tf.TensorSpec) -> list[int]:
    """Traces a function and returns the indices of its results that are not None."""
    present: list[int] = []

    def traced(*tensors: tf.Tensor) -> list:
        results = function(*tensors)
        present[:] = [i for i, result in enumerate(results) if result is not None]
        return [result for result in results if result is not None]

    tf.function(traced, autograph=False).get_concrete_function(*specs)
    return present
