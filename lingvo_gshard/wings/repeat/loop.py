"""Loop: a body run several times in one tf.while_loop, with a second loop as its gradient.

The body is a function of (x, *shared, *weights). The loop carries x from one iteration to the next.
All iterations read the same shared tensors, and each reads its own slice of the stacked weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

from lingvo_gshard.core import (
    Iteration,
    Layer,
    NestedMap,
    RematUnit,
    Repetition,
    Reports,
    VariableSpec,
    context,
    custom_gradient,
    known_sizes,
    layer_method,
    optimization_barrier,
    remat_policy,
    stop_frozen,
    tf,
    to_device,
    to_host,
    write_slice,
)
from lingvo_gshard.layers import Execution
from lingvo_gshard.sharding import (
    MASTERS,
    annotate,
    annotate_like,
    annotate_stack,
    current_partitioning,
    mesh_in_use,
    own_shard,
    recording,
    stack_of_shards,
    xla,
)
from lingvo_gshard.wings.repeat import subgraph
from lingvo_gshard.wings.repeat.joint_graph import JointGraph
from lingvo_gshard.wings.repeat.minimum_cut import MemoryCosts, RematCosts, TimeCosts

Tensors: TypeAlias = "Sequence[tf.Tensor]"


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """The result of a loop.

    Attributes:
      output: x after the last iteration.
      reports: names of the losses and metrics that the body reported.
      values: values of the reports, each stacked over the iterations.
    """

    output: tf.Tensor
    reports: Reports
    values: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _TracedBody:
    """The traced graph of one iteration of the body.

    Attributes:
      saved_layouts: letters of each saved tensor; None where they are unknown.
      saved_shards: whether each saved tensor is a shard, computed inside a manual region.
      saves_on_host: whether saved tensors are kept in host memory, except for shards and tensors
        without letters.
    """

    joint: JointGraph
    reports: Reports
    saved_layouts: list[str | None]
    saved_shards: list[bool]
    saves_on_host: bool

    def carried_specs(self) -> list[tf.TensorSpec]:
        """Returns the specs of the results of `leave`."""
        mesh = mesh_in_use()
        specs = map(spec_of, self.joint.saved)
        return [
            tf.TensorSpec([mesh.size, *spec.shape], spec.dtype) if mesh and is_shard else spec
            for spec, is_shard in zip(specs, self.saved_shards, strict=True)
        ]

    def leave(self, saved: Tensors) -> list[tf.Tensor]:
        """Returns the saved tensors as the loop carries them.

        Full tensors take the place of shards. Offloaded tensors are in host memory.
        """
        return [self._left(*each) for each in self._with_layouts(saved)]

    def enter(self, saved: Tensors) -> list[tf.Tensor]:
        """Returns the saved tensors as the backward pass of an iteration reads them."""
        return [self._entered(*each) for each in self._with_layouts(saved)]

    def annotate_stacks(self, stacks: Tensors) -> list[tf.Tensor]:
        """Returns the stacks of the saved tensors over all iterations, annotated.

        Stacks in host memory are not: an annotation would copy them.
        """
        return [self._annotated(*each) for each in self._with_layouts(stacks)]

    def _with_layouts(self, tensors: Tensors) -> Iterable[tuple[tf.Tensor, str | None, bool]]:
        return zip(tensors, self.saved_layouts, self.saved_shards, strict=True)

    def _left(self, x: tf.Tensor, layout: str | None, is_shard: bool) -> tf.Tensor:
        if is_shard:
            return stack_of_shards(x)
        return x if layout is None or not self.saves_on_host else to_host(annotate(x, layout))

    def _entered(self, x: tf.Tensor, layout: str | None, is_shard: bool) -> tf.Tensor:
        if is_shard:
            return own_shard(x)
        return x if layout is None or not self.saves_on_host else annotate(to_device(x), layout)

    def _annotated(self, stack: tf.Tensor, layout: str | None, is_shard: bool) -> tf.Tensor:
        if is_shard:
            return annotate_stack(stack, 1)
        return stack if layout is None or self.saves_on_host else annotate(stack, f"R{layout}")


class _Weights:
    """The weights of the iterations of a loop, some of them gathered one iteration ahead.

    A gather of one layer then runs beside the products of the layer before. Nothing would run
    beside a gather of all layers, which all products need.
    """

    def __init__(self, stacks: Tensors, specs: Sequence[VariableSpec], times: int):
        """Takes the stacked weights, and their specs in one of `times` iterations."""
        self._stacks, self._specs, self._last = stacks, specs, times - 1
        is_ahead = context.current().gathers_ahead and times > 1
        current = current_partitioning() if is_ahead else None
        self._ahead = [
            i for i, s in enumerate(specs) if current and s.inputs and current.is_gathered(s)
        ]

    def ahead(self, r: tf.Tensor) -> list[tf.Tensor]:
        """Returns the weights to gather ahead, for iteration r or the last one."""
        r = tf.minimum(r, self._last)
        slices = [(read(self._stacks[i], r), self._specs[i]) for i in self._ahead]
        return [annotate_like(annotate_like(w, spec, MASTERS), spec) for w, spec in slices]

    def annotated(self, gathered: Tensors) -> list[tf.Tensor]:
        """Returns what was gathered as a loop carries it: whole, lest XLA splits it in between."""
        specs = (self._specs[i] for i in self._ahead)
        return [annotate_like(w, spec) for w, spec in zip(gathered, specs, strict=True)]

    def empty_stacks(self) -> list[tf.Tensor]:
        """Returns stacks for what is gathered."""
        return self._annotated_stacks([tf.zeros_like(self._stacks[i]) for i in self._ahead])

    def written(self, stacks: Tensors, r: tf.Tensor, gathered: Tensors) -> list[tf.Tensor]:
        """Returns the stacks with what iteration r reads, which the backward pass reads again."""
        pairs = zip(stacks, gathered, strict=True)
        return self._annotated_stacks([write_slice(s, w[tf.newaxis], r) for s, w in pairs])

    def of_iteration(self, r: tf.Tensor, gathered: Tensors) -> list[tf.Tensor]:
        """Returns the weights of iteration r; `gathered` is `ahead(r)`."""
        known = dict(zip(self._ahead, gathered, strict=True))
        pairs = enumerate(zip(self._stacks, self._specs, strict=True))
        return [known[i] if i in known else annotate_like(read(w, r), s) for i, (w, s) in pairs]

    def with_gathered(self, stacks: Tensors) -> list[tf.Tensor]:
        """Returns the stacked weights, with stacks of what was gathered in their place."""
        known = dict(zip(self._ahead, stacks, strict=True))
        return [known.get(i, stack) for i, stack in enumerate(self._stacks)]

    def _annotated_stacks(self, stacks: Tensors) -> list[tf.Tensor]:
        found = []
        for i, stack in zip(self._ahead, stacks, strict=True):
            spec, shape = self._specs[i], known_sizes(stack.shape)
            spec = dataclasses.replace(spec, layout=f"R{spec.layout}", shape=tuple(shape))
            found.append(annotate_like(stack, spec))
        return found


@dataclasses.dataclass(frozen=True)
class Loop:
    """Runs a body `repetition.times` times.

    Attributes:
      repetition: names of the layers in each iteration.
      weight_specs: specs of the weights of one iteration.
    """

    body: RematUnit
    repetition: Repetition
    layout: str
    weight_specs: Sequence[VariableSpec]

    def run(self, *tensors: tf.Tensor) -> LoopResult:
        """Runs the loop. Its gradient is a loop over the iterations in reverse order.

        For the gradient, each iteration saves the tensors that a minimum cut chooses among the
        tensors that the policy allows. The other tensors are recomputed, and weights are read a
        second time.

        Args:
          *tensors: x, the shared tensors, and the stacked weights.
        """
        traced = self._trace(tensors)

        @custom_gradient
        def compute(*tensors: tf.Tensor):
            x, values, saved, weights = self._forward(tensors, traced)
            tensors = (*tensors[: self._first_weight(tensors)], *weights)

            def gradient(dx: tf.Tensor, *d_values: tf.Tensor) -> list[tf.Tensor | None]:
                return self._backward(tensors, traced, saved, dx, d_values)

            return (x, *values), gradient

        x, *values = compute(*tensors)
        return LoopResult(x, traced.reports, values)

    def _trace(self, tensors: Tensors) -> _TracedBody:
        runs: list[tuple[Reports, remat_policy.SavedProducts]] = []

        def iteration(*tensors_and_r: tf.Tensor) -> Tensors:
            *tensors, r = tensors_and_r
            output, reports, saved = self.body.forward(tensors, Iteration(self.repetition, r))
            runs.append((reports, saved))
            return [output, *reports.values]

        def make_costs(forward_only: Collection[tf.Operation]) -> RematCosts:
            if self.body.policy == remat_policy.NONE:
                return TimeCosts(forward_only)
            return MemoryCosts(forward_only, runs[-1][1].results)

        end = self._first_weight(tensors)
        shared, weights = tensors[1:end], tensors[end:]
        index_spec = tf.TensorSpec([], tf.int32)
        slice_specs = [tf.TensorSpec(stack.shape[1:], stack.dtype) for stack in weights]
        shared_specs = [*map(spec_of, shared), *slice_specs, index_spec]
        x_spec = spec_of(tensors[0])
        joint = JointGraph.trace(
            iteration, [x_spec], shared_specs, make_costs, self._annotate_gradients
        )
        reports, products = runs[-1]
        layouts = dict(zip(map(id, products.results), products.layouts, strict=True))
        layouts[id(joint.forward_inputs[0])] = self.layout
        shards = _shards_in(joint.graph)
        return _TracedBody(
            joint,
            reports,
            [layouts.get(id(x)) for x in joint.saved],
            [x.name in shards for x in joint.saved],
            remat_policy.is_offloaded(self.body.policy),
        )

    def _annotate_gradients(self, gradients: list[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """Returns the gradients of an iteration, with weight gradients annotated and narrowed."""
        *gradients, d_index = gradients
        first_weight = len(gradients) - len(self.weight_specs)
        d_weights = map(_weight_gradient, gradients[first_weight:], self.weight_specs)
        return [*gradients[:first_weight], *d_weights, d_index]

    def _forward(
        self, tensors: Tensors, traced: _TracedBody
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Returns the output, then stacks: values of reports, saved tensors, and weights."""
        joint, first = traced.joint, self._first_weight(tensors)
        weights = _Weights(tensors[first:], self.weight_specs, self.repetition.times)

        def step(
            r: tf.Tensor, x: tf.Tensor, stacks: list, gathered: list, kept: list
        ) -> tuple[Any, ...]:
            following, gathered = weights.ahead(r + 1), weights.annotated(gathered)
            inputs = [*tensors[1:first], *weights.of_iteration(r, gathered), r]
            (output, *values), saved = joint.forward([x], inputs)
            results = [*values, *traced.leave(saved)]
            stacks = [s.write(r, y) for s, y in zip(stacks, results, strict=True)]
            return r + 1, output, stacks, following, weights.written(kept, r, gathered)

        reported = joint.outputs[1:]
        stacks = [self._stack_of(x) for x in (*reported, *traced.carried_specs())]
        ahead = (weights.ahead(tf.constant(0)), weights.empty_stacks())
        start = (tf.constant(0), tensors[0], stacks, *ahead)
        _, output, stacks, _, kept = self._while(step, start)
        recording.add_loop(output, joint.graph)
        stacked = [stack.stack() for stack in stacks]
        saved = traced.annotate_stacks(stacked[len(reported) :])
        return output, stacked[: len(reported)], saved, weights.with_gathered(kept)

    def _backward(
        self,
        tensors: Tensors,
        traced: _TracedBody,
        saved: Tensors,
        dx: tf.Tensor,
        d_values: Tensors,
    ) -> list[tf.Tensor | None]:
        """Returns the gradients of the loop's arguments; None if no output depends on one."""
        joint = traced.joint
        first_weight = self._first_weight(tensors)
        if self.repetition.times == 1 and self.body.policy != remat_policy.NONE:
            # XLA inlines a loop of one iteration. XLA would then merge recomputed tensors with
            # tensors of the forward pass, and thus save the recomputed ones.
            tensors, saved, (dx,) = optimization_barrier(tensors, saved, [dx])

        def iteration_gradients(r: tf.Tensor, dx: tf.Tensor) -> list[tf.Tensor | None]:
            upstream = [dx, *(read(d, r) for d in d_values)]
            saved_here = traced.enter([read(stack, r) for stack in saved])
            return joint.backward(self._inputs_of_iteration(r, tensors), saved_here, upstream)

        present = [i for i, gradient in enumerate(joint.gradients) if gradient is not None]
        summed = [i for i in present if 0 < i < first_weight]
        stacked = [i for i in present if i >= first_weight]

        def step(count: tf.Tensor, dx: tf.Tensor, sums: list, stacks: list) -> tuple:
            r = self.repetition.times - 1 - count
            gradients: list[Any] = iteration_gradients(r, dx)
            sums = [s + tf.cast(gradients[i], s.dtype) for s, i in zip(sums, summed, strict=True)]
            stacks = [s.write(r, gradients[i]) for s, i in zip(stacks, stacked, strict=True)]
            return count + 1, gradients[0], sums, stacks

        sums = [tf.zeros(tensors[i].shape, tf.float32) for i in summed]
        stacks = [self._stack_of(joint.gradients[i]) for i in stacked]
        _, dx, sums, stacks = self._while(step, (tf.constant(0), dx, sums, stacks))
        gradients: list[tf.Tensor | None] = [None] * len(tensors)
        values = [*sums, *(stack.stack() for stack in stacks)]
        for i, value in zip([*summed, *stacked], values, strict=True):
            gradients[i] = tf.cast(value, tensors[i].dtype)
        return [dx, *gradients[1:]]

    def _first_weight(self, tensors: Tensors) -> int:
        """Returns the index of the first stacked weight among the arguments of the loop."""
        return len(tensors) - len(self.weight_specs)

    def _inputs_of_iteration(self, r: tf.Tensor, tensors: Tensors) -> list[tf.Tensor]:
        """Returns the shared tensors, the weights of iteration r, and r."""
        first = self._first_weight(tensors)
        pairs = zip(tensors[first:], self.weight_specs, strict=True)
        return [*tensors[1:first], *(annotate_like(read(w, r), spec) for w, spec in pairs), r]

    def _stack_of(self, element: tf.Tensor | tf.TensorSpec) -> tf.TensorArray:
        times = self.repetition.times
        return tf.TensorArray(element.dtype, times, element_shape=element.shape)

    def _while(self, step: Callable, start: tuple) -> Any:
        times = self.repetition.times
        return tf.while_loop(lambda count, *_: count < times, step, start, maximum_iterations=times)


def read(stack: tf.Tensor, r: tf.Tensor) -> tf.Tensor:
    """Returns slice r of a stack. XLA reads no more than this slice."""
    start = [r] + [0] * (stack.shape.rank - 1)
    return tf.squeeze(tf.slice(stack, start, [1, *stack.shape[1:]]), 0)


def spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    """Returns the shape and the type of a tensor."""
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _shards_in(graph: tf.Graph) -> set[str]:
    """Returns the names of the tensors of a graph that are shards of one device."""
    operations = graph.get_operations()
    entries = [y for op in operations if op.type == xla.ENTER_REGION for y in op.outputs]
    return subgraph.dependent_tensors(entries, ignoring={xla.LEAVE_REGION})


def _weight_gradient(gradient: tf.Tensor | None, spec: VariableSpec) -> tf.Tensor | None:
    """Returns a weight's gradient, annotated like the weight's moments if these are split further.

    A gradient that was computed in a narrower type and then cast to a wider one is returned in the
    narrower type. The narrower gradient has all the information, and a stack of such gradients
    takes half the memory.
    """
    if gradient is None:
        return None
    if gradient.op.type == "Cast" and gradient.op.inputs[0].dtype.size < gradient.dtype.size:
        gradient = gradient.op.inputs[0]
    return annotate_like(gradient, spec, MASTERS)


# Letters of the input and the output of every layer.
_ACTIVATIONS = "BLM"


class Repeat(Execution):
    """Runs `body`, `times` times, in one compiled loop.

    The time to compile it does not depend on the number of layers. A weight of `body[1]` is a stack
    over the letter R of the weights that layers 1, 3, 5, ... would have in a body of two. Each
    layer has the initial weights, random numbers and metric names that it would have without the
    loop.
    """

    def variable_specs(self) -> NestedMap:
        """Returns the VariableSpecs of the body, each with a leading dimension R."""
        return super().variable_specs().transform(self._stacked)

    def _stacked(self, spec: VariableSpec) -> VariableSpec:
        return dataclasses.replace(
            spec,
            layout=f"R{spec.layout}",
            shape=(self.p.times, *spec.shape),
            slices=tuple(self.repetition.paths(spec.path)),
        )

    @layer_method
    def unrolled(self, theta: NestedMap) -> list[tuple[Layer, NestedMap]]:
        return [pair for r in range(self.p.times) for pair in self._body_of_iteration(theta, r)]

    @layer_method
    def _body_of_iteration(self, theta: NestedMap, r: int) -> list[tuple[Layer, NestedMap]]:
        # Slices need annotations of their own.
        pairs = zip(theta.flatten(), super().variable_specs().flatten(), strict=True)
        weights = theta.pack(annotate_like(weight[r], spec) for weight, spec in pairs)
        return list(zip(self.body, weights.body, strict=True))

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Returns [B,L,M]; see the base class."""
        if tf.executing_eagerly():
            return self._fprop_eagerly(theta, x_BLM, *shared)
        specs = super().variable_specs()
        flat = tf.nest.flatten(shared)

        def run_body(x_BLM: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:
            layer_inputs = tf.nest.pack_sequence_as(shared, tensors[: len(flat)])
            weights = specs.pack(stop_frozen(specs.flatten(), tensors[len(flat) :]))
            x_BLM = annotate(x_BLM, _ACTIVATIONS)
            layers = list(zip(self.body, weights.body, strict=True))
            return annotate(self.run_layers(layers, x_BLM, *layer_inputs), _ACTIVATIONS)

        body = RematUnit(run_body, self.p.rematerialize)
        loop = Loop(body, self.repetition, _ACTIVATIONS, specs.flatten())
        result = loop.run(x_BLM, *flat, *theta.flatten())
        result.reports.stacked(self.repetition).add_to(context.current(), result.values)
        return result.output

    @layer_method
    def _fprop_eagerly(self, theta: NestedMap, x_BLM: tf.Tensor, *shared: object) -> tf.Tensor:
        """Runs the layers one by one: in eager mode no loop is compiled."""
        forward_pass, values = context.current(), []
        for r in range(self.p.times):
            with context.use(forward_pass.part(Iteration(self.repetition, r))) as part:
                x_BLM = self.run_layers(self._body_of_iteration(theta, r), x_BLM, *shared)
            reports = Reports.of(part)
            values.append(reports.values)
        stacks = [tf.stack(over_iterations) for over_iterations in zip(*values, strict=True)]
        reports.stacked(self.repetition).add_to(forward_pass, stacks)
        return x_BLM
