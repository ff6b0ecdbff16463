"""The compiled loop of a pipeline: ticks in which all stages compute; and the loop back.

Stages are the first dimension of a tensor, P, and what moves micro-batches on is a shift along it:
where P is split over devices, a collective-permute (Xu et al. 2021, arXiv 2105.04663, section 3.3).

    state [P,B,L,M]      what each stage is about to compute
    store [R,P,B,L,M]    R micro-batches; with the first stage those that wait to enter, or to enter
                         again, and at last the outputs; what is with others nobody reads

In every tick the stages compute their states. The results move on by one stage, from the last one
to the first, which stores what it gets and takes from the store what comes next. An idle stage
computes what it happens to have; nobody reads what it finds, so that its gradient is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.autodiff.remat_unit import RematUnit, Reports
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.repetition import Iteration, Repetition
from lingvo_gshard.layers.stacks.loop import read, spec_of
from lingvo_gshard.layers.stacks.pipeline_operands import OfLayer, OfMicroBatch
from lingvo_gshard.layers.stacks.pipeline_schedule import Schedule
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.collectives import rotated
from lingvo_gshard.sharding.partitioning import current_partitioning, use_partitioning
from lingvo_gshard.sharding.vectorize import vectorize

Tensors = Sequence[tf.Tensor]

STAGES = "P"
_STATE, _STORE = "PBLM", "RPBLM"


@dataclasses.dataclass(frozen=True)
class _Traced:
    """What one time through a segment reports and keeps, and which arguments have gradients."""

    reports: Reports
    values: list[tf.TensorSpec]
    kept: list[tf.TensorSpec]
    kept_layouts: list[str]
    with_gradient: list[int]


@dataclasses.dataclass(frozen=True)
class PipelineLoop:
    """Runs a segment over all micro-batches in all stages, in each as often as it has layers.

    The segment is a function of (x [B,L,M], *fixed, micro-batch's number, *weights), of the rows of
    a micro-batch and the weights of one time through it, whose specs are `weights`.
    """

    unit: RematUnit
    schedule: Schedule
    repetition: Repetition
    weights: Sequence[VariableSpec]

    @property
    def per_tick(self) -> int:
        """How many times a stage runs the segment in a tick."""
        return self.repetition.times // (self.schedule.stages * self.schedule.circulations)

    def run(
        self, x: tf.Tensor, fixed: Tensors, weights: Tensors
    ) -> tuple[tf.Tensor, Reports, list[tf.Tensor]]:
        """Returns the output [R,B,L,M], and names and values [T,P] of what was reported.

        x: [R,B,L,M]. fixed: each [R,B,...]. weights: each [P,R,...]. T: every time that the stages
        ran the segment, also those in which some were idle. The gradient runs it again, last time
        first; kept in between are the inputs and the products that the segment's policy names.
        """
        tensors = [x, *fixed, *weights]
        traced = self._trace(tensors)

        @custom_gradient
        def compute(*tensors: tf.Tensor):
            one_pass = _Pass(self, tensors, traced)
            output, values, kept = one_pass.forward()

            def gradient(d_output: tf.Tensor, *d_values: tf.Tensor) -> list[tf.Tensor | None]:
                return one_pass.backward(kept, d_output, d_values)

            return (output, *values), gradient

        output, *values = compute(*tensors)
        return output, traced.reports, values

    def arguments(self, x: tf.Tensor, micro_batch: tf.Tensor, operands: Tensors) -> list[tf.Tensor]:
        """Returns the segment's arguments."""
        fixed = len(operands) - len(self.weights)
        return [x, *operands[:fixed], micro_batch, *operands[fixed:]]

    def gradients(self, *arguments: object) -> list[tf.Tensor | None]:
        """Returns the segment's gradients: of x and of the operands."""
        found = self.unit.gradients(*arguments)
        del found[-1 - len(self.weights)]
        return found

    def _trace(self, tensors: Tensors) -> _Traced:
        """Runs the segment of one stage aside, to see what it does."""
        traced = []

        def once(x: tf.Tensor, *operands: tf.Tensor) -> list[tf.Tensor | None]:
            arguments = self.arguments(x, tf.constant(0), operands)
            iteration = Iteration(self.repetition, tf.constant(0))
            output, reports, kept = self.unit.forward(arguments, iteration)
            specs = [[spec_of(y) for y in found] for found in (reports.values, kept.results)]
            traced.append((reports, *specs, kept.layouts))
            upstream = [tf.ones_like(y) for y in (output, *reports.values)]
            return self.gradients(arguments, kept.results, upstream, iteration)

        others = len(tensors) - len(self.weights)
        slices = [t[0] for t in tensors[:others]] + [t[0, 0] for t in tensors[others:]]
        partitioning = current_partitioning()
        with use_partitioning(partitioning and partitioning.within_stack(STAGES)):
            found = _results_of(once, *map(spec_of, slices))
        return _Traced(*traced[-1], list(found))


class _Pass:
    """One pass over given tensors."""

    def __init__(self, loop: PipelineLoop, tensors: Tensors, traced: _Traced):
        self._loop, self._traced, self._schedule = loop, traced, loop.schedule
        self._x = tensors[0]
        others = len(tensors) - len(loop.weights)
        self._operands = [
            *(OfMicroBatch(tensor, self._schedule) for tensor in tensors[1:others]),
            *(
                OfLayer(weight, spec, self._schedule, loop.per_tick)
                for weight, spec in zip(tensors[others:], loop.weights, strict=True)
            ),
        ]
        self._with_gradient = [self._operands[i - 1] for i in traced.with_gradient if i]
        self._is_first = tf.reshape(tf.range(self._schedule.stages), [-1, 1, 1, 1]) == 0

    def forward(self) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Returns the output and, stacked over all times, what is reported and what is kept."""
        ticks, per_tick = self._schedule.ticks, self._loop.per_tick

        def tick(t: tf.Tensor, state: tf.Tensor, store: tf.TensorArray, stacks: list) -> tuple:
            def time(r: tf.Tensor, x: tf.Tensor, stacks: list) -> tuple:
                y, *results = self._compute(t, r, x)
                values = len(self._traced.values)
                results.insert(values, x)
                n = t * per_tick + r
                pairs = zip(stacks, results, strict=True)
                return r + 1, annotate(y, _STATE), [s.write(n, result) for s, result in pairs]

            _, y, stacks = _repeat(per_tick, time, (tf.constant(0), state, stacks))
            moved = annotate(rotated(y, 0), _STATE)
            place, is_through = self._left(t)
            store = store.write(place, tf.where(is_through, moved, store.read(place)))
            state = tf.where(self._is_first, store.read(self._entering(t)), moved)
            return t + 1, annotate(state, _STATE), store, stacks

        specs = [*self._traced.values, spec_of(self._x[0]), *self._traced.kept]
        stacks = [self._stack_of(spec) for spec in specs]
        store = self._store_of(self._x, everywhere=True)
        start = (tf.constant(0), annotate(store.read(0), _STATE), store, stacks)
        _, _, store, stacks = _repeat(ticks, tick, start)
        found = [stack.stack() for stack in stacks]
        values = len(self._traced.values)
        layouts = ["BLM", *self._traced.kept_layouts]
        kept = [
            annotate(stack, f"R{STAGES}{layout}", unsplit="R")
            for stack, layout in zip(found[values:], layouts, strict=True)
        ]
        return self._at_first(store), found[:values], kept

    def backward(
        self, kept: Tensors, d_output: tf.Tensor, d_values: Tensors
    ) -> list[tf.Tensor | None]:
        """Returns the gradients of the pass's tensors; None for those that nothing depends on."""
        ticks, per_tick = self._schedule.ticks, self._loop.per_tick

        def tick(count: tf.Tensor, d_state: tf.Tensor, d_store: tf.TensorArray, sums: list):
            t = ticks - 1 - count
            entering, (place, is_through) = self._entering(t), self._left(t)
            zero = tf.zeros([], d_state.dtype)
            d_taken = tf.where(self._is_first, d_state, zero)
            d_store = d_store.write(entering, d_store.read(entering) + d_taken)
            d_placed = d_store.read(place)
            d_moved = tf.where(self._is_first, zero, d_state)
            d_moved += tf.where(is_through, d_placed, zero)
            d_store = d_store.write(place, tf.where(is_through, zero, d_placed))
            d_moved = annotate(d_moved, _STATE)
            dy = annotate(rotated(d_moved, 0, -1), _STATE)

            def time(done: tf.Tensor, dy: tf.Tensor, sums: list) -> tuple:
                r = per_tick - 1 - done
                n = t * per_tick + r
                results = [read(stack, n) for stack in (*kept, *d_values)]
                dx, *gradients = self._gradients(t, r, dy, results)
                triples = zip(self._with_gradient, sums, gradients, strict=True)
                sums = [operand.add(total, t, r, d) for operand, total, d in triples]
                return done + 1, annotate(dx, _STATE), sums

            _, dx, sums = _repeat(per_tick, time, (tf.constant(0), dy, sums))
            return count + 1, dx, d_store, sums

        sums = [operand.zeros() for operand in self._with_gradient]
        d_state = annotate(
            tf.zeros([self._schedule.stages, *self._x[0].shape], self._x.dtype), _STATE
        )
        start = (tf.constant(0), d_state, self._store_of(d_output, everywhere=False), sums)
        _, d_state, d_store, sums = _repeat(ticks, tick, start)
        d_store = d_store.write(0, d_store.read(0) + d_state)
        gradients: list[tf.Tensor | None] = [None] * (1 + len(self._operands))
        gradients[0] = self._at_first(d_store)
        pairs = zip(self._with_gradient, sums, strict=True)
        found = filter(None, self._traced.with_gradient)
        for i, (operand, total) in zip(found, pairs, strict=True):
            gradients[i] = operand.gradient(total)
        return gradients

    def _compute(self, t: tf.Tensor, r: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
        """The stages' results, the reports' values and the kept products, each [P,...]."""
        loop = self._loop

        def stage(time: tf.Tensor, micro_batch: tf.Tensor, x: tf.Tensor, *operands: tf.Tensor):
            arguments = loop.arguments(x, micro_batch, operands)
            iteration = Iteration(loop.repetition, time)
            output, reports, kept = loop.unit.forward(arguments, iteration)
            return [output, *reports.values, *kept.results]

        return vectorize(STAGES, stage, *self._indices(t, r), x, *self._read(t, r))

    def _gradients(
        self, t: tf.Tensor, r: tf.Tensor, dy: tf.Tensor, results: Tensors
    ) -> list[tf.Tensor]:
        """Gradients of x and of operands, each [P,...]; results: x, what is kept, d_values."""
        loop, kept, count = self._loop, len(self._traced.kept), len(self._operands)

        def stage(time: tf.Tensor, micro_batch: tf.Tensor, dy: tf.Tensor, *rest: tf.Tensor):
            operands, (x, *results) = rest[:count], rest[count:]
            arguments = loop.arguments(x, micro_batch, operands)
            upstream = [dy, *results[kept:]]
            iteration = Iteration(loop.repetition, time)
            found = loop.gradients(arguments, results[:kept], upstream, iteration)
            return [found[i] for i in self._traced.with_gradient]

        return vectorize(STAGES, stage, *self._indices(t, r), dy, *self._read(t, r), *results)

    def _indices(self, t: tf.Tensor, r: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Which time through all layers, and which micro-batch, each stage has."""
        schedule = self._schedule
        chunk = schedule.circulation(t) * schedule.stages + tf.range(schedule.stages)
        return chunk * self._loop.per_tick + r, schedule.micro_batch(t)

    def _read(self, t: tf.Tensor, r: tf.Tensor) -> list[tf.Tensor]:
        return [operand.read(t, r) for operand in self._operands]

    def _left(self, t: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The place of the micro-batch that the last stage computes, and whether there is one."""
        number = t + 1 - self._schedule.stages
        return tf.math.floormod(number, self._schedule.micro_batches), number >= 0

    def _entering(self, t: tf.Tensor) -> tf.Tensor:
        """The place of the micro-batch that enters after a tick; any one where none does."""
        return tf.math.floormod(t + 1, self._schedule.micro_batches)

    def _store_of(self, x: tf.Tensor, everywhere: bool) -> tf.TensorArray:
        """A store with x [R,B,L,M] at the first stage; at others the same, or zeros."""
        count, *shape = x.shape
        shape = [self._schedule.stages, *shape]
        whole = tf.broadcast_to(x[:, None], [count, *shape])
        if not everywhere:
            whole = tf.where(self._is_first, whole, tf.zeros([], x.dtype))
        array = tf.TensorArray(x.dtype, count, element_shape=shape, clear_after_read=False)
        return array.unstack(annotate(whole, _STORE, unsplit="R"))

    def _at_first(self, store: tf.TensorArray) -> tf.Tensor:
        """What is stored [R,B,L,M] with the first stage."""
        return annotate(store.stack(), _STORE, unsplit="R")[:, 0]

    def _stack_of(self, spec: tf.TensorSpec) -> tf.TensorArray:
        times = self._schedule.ticks * self._loop.per_tick
        shape = [self._schedule.stages, *spec.shape]
        return tf.TensorArray(spec.dtype, times, element_shape=shape)


def _repeat(times: int, body: Callable, start: tuple) -> tuple:
    if times == 1:
        return body(*start)
    return tf.while_loop(lambda count, *_: count < times, body, start, maximum_iterations=times)


def _results_of(function: Callable[..., list], *specs: tf.TensorSpec) -> dict[int, tf.TensorSpec]:
    """Shape and type of a function's results, those that there are, by their place."""
    found: dict[int, tf.TensorSpec] = {}

    def traced(*tensors: tf.Tensor) -> list:
        results = function(*tensors)
        found.update((i, spec_of(x)) for i, x in enumerate(results) if x is not None)
        return [result for result in results if result is not None]

    tf.function(traced, autograph=False).get_concrete_function(*specs)
    return found
