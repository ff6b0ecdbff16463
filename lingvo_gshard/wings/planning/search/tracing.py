"""Traces a task for the cost model. Nothing is compiled, so models of any size can be traced."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from lingvo_gshard.core import VariableSpec, context, known_sizes, tf
from lingvo_gshard.sharding import recording, use_partitioning
from lingvo_gshard.tasks import BatchSpecs
from lingvo_gshard.training import Trainer
from lingvo_gshard.wings.planning.search.candidates import Einsum, Flow, Tensor, TracedStep
from lingvo_gshard.wings.planning.search.execution import as_executed

# Norms compute a mean over the model dimension. The result of a norm counts as another tensor than
# the input of the norm.
_SUMS = frozenset(("Mean",))
_LOOPS = frozenset(("While", "StatelessWhile"))
# The inputs whose values such an operation returns. Its other inputs choose among these values.
_VALUES = {"GatherV2": slice(0, 1), "SelectV2": slice(1, 3)}


class UpstreamFinder:
    """Finds the nearest recorded tensor upstream of a tensor.

    Args:
      recorded: index of each recorded tensor in the order of the trace, by the tensor's id.
      last_of: index of the last recorded tensor of each graph, by the graph's name. The results of
        a loop come from the last tensor of its body.
    """

    def __init__(self, recorded: Mapping[int, int], last_of: Mapping[str, int] | None = None):
        self._recorded, self._last_of = recorded, last_of or {}
        self._nearest: dict[int, tuple[int, bool] | None] = {}

    def nearest(self, tensor: tf.Tensor) -> tuple[int, bool] | None:
        """Returns the nearest recorded tensor, which may be `tensor` itself; None if there is none.

        If a tensor is computed from several recorded tensors, the last of these counts. So a
        residual stream comes from the last layer that added to the stream. A lookup comes from its
        table. An argument of a loop's body comes from nothing.

        Returns:
          The recorded tensor's index, and whether it is reached without a norm's mean or a loop.
        """
        if id(tensor) in self._recorded:
            return self._recorded[id(tensor)], True
        return self.before(tensor)

    def before(self, tensor: tf.Tensor) -> tuple[int, bool] | None:
        """Returns the nearest recorded tensor other than `tensor`; see `nearest`."""
        pending = [tensor]
        while pending:
            top = pending[-1]
            if id(top) in self._nearest:
                pending.pop()
                continue
            inputs = list(top.op.inputs)[_VALUES.get(top.op.type, slice(None))]
            missing = [
                x for x in inputs if id(x) not in self._recorded and id(x) not in self._nearest
            ]
            if missing:
                pending.extend(missing)
            else:
                self._nearest[id(pending.pop())] = self._last(top, inputs)
        return self._nearest[id(tensor)]

    def _last(self, tensor: tf.Tensor, inputs: list[tf.Tensor]) -> tuple[int, bool] | None:
        sources = [
            (self._recorded[id(x)], True) if id(x) in self._recorded else self._nearest[id(x)]
            for x in inputs
        ]
        sources = [source for source in sources if source is not None]
        if tensor.op.type in _LOOPS:
            last = self._last_of.get(tensor.op.get_attr("body").name)
            if last is not None:
                return last, False
        if not sources:
            return None
        last = max(number for number, _ in sources)
        is_direct = all(direct for number, direct in sources if number == last)
        return last, is_direct and tensor.op.type not in _SUMS


# A rematerialization unit: the body of a loop, or one layer of a list.
_UNIT = re.compile(r"(.*?\.body)\[|(.*?\[\d+\])")

# Name scope of gradients.
_GRADIENT = "gradient_tape/"


def trace(
    trainer: Trainer,
    batch: BatchSpecs,
    micro_batches: int = 1,
    precision: str = "",
    platform: str = "",
) -> TracedStep:
    """Returns a trainer's loss of one micro-batch, traced without a mesh.

    Args:
      micro_batches: number of micro-batches, which divides the rows of the batch.
      precision: the trainer's, if it is a choice of the search.
      platform: one of `platforms.PLATFORMS`, whose kernels attend; "" for einsums.
    """
    inputs = sum(math.prod(known_sizes(s.shape)) * s.dtype.size for s in batch.values())
    batch = {name: _part(spec, micro_batches) for name, spec in batch.items()}
    specs, names = trainer.theta_specs, sorted(batch)
    weights = specs.flatten()

    def loss(*tensors: tf.Tensor) -> tf.Tensor:
        theta = specs.pack(tensors[: len(weights)])
        inputs = dict(zip(names, tensors[len(weights) :], strict=True))
        with context.scope(training=True, seed=tf.zeros([2], tf.int32)):
            return trainer.task.loss(theta, inputs)[0]

    signature = [tf.TensorSpec(s.shape, s.dtype) for s in weights] + [batch[n] for n in names]
    with recording.record() as recorded, use_partitioning(None):
        concrete = tf.function(loss, autograph=False).get_concrete_function(*signature)
        reader = _Reader(_forward_events(recorded.events), recorded.loops, weights)
        einsums, flows = reader.einsums(), reader.flows()
    del concrete
    einsums, flows = as_executed(einsums, flows, trainer.task, platform)
    moments: dict[str, tuple[VariableSpec, ...]] = collections.defaultdict(tuple)
    for moment in trainer.optimizer.moment_specs(specs).flatten():
        moments[moment.path.rpartition("/")[0]] += (moment,)
    return TracedStep(
        einsums=tuple(einsums),
        flows=tuple(flows),
        weights=tuple(weights),
        moments=dict(moments),
        inputs=inputs,
        micro_batches=micro_batches,
        precision=precision,
    )


def _part(spec: tf.TensorSpec, micro_batches: int) -> tf.TensorSpec:
    rows, *rest = known_sizes(spec.shape)
    return tf.TensorSpec((rows // micro_batches, *rest), spec.dtype)


def _forward_events(events: list[recording.Event]) -> list[recording.Event]:
    """Returns the events of the forward pass, with each loop body once.

    Leaves out earlier traces of a loop's body, gradients, stacks of tensors that a loop saves,
    annotations of einsum results, and repeated annotations of a tensor.
    """
    events = [event for event in events if _GRADIENT not in event.result.op.name]
    by_graph: dict[int, list[recording.Event]] = {}
    for event in events:
        by_graph.setdefault(id(event.result.graph), []).append(event)
    last = {
        tuple((e.equation, e.path) for e in of_graph): graph for graph, of_graph in by_graph.items()
    }
    computed = {id(e.result) for e in events if not e.is_annotation}
    first_with = {(id(e.result), e.equation): e for e in reversed(events)}
    return [
        e
        for e in events
        if id(e.result.graph) in last.values()
        and "R" not in e.equation
        and not (e.is_annotation and id(e.result) in computed)
        and not (e.is_annotation and first_with[id(e.result), e.equation] is not e)
    ]


class _Reader:
    """Makes einsums and flows from the events of a trace. The traced graph must still exist."""

    def __init__(
        self,
        events: list[recording.Event],
        loops: list[tuple[tf.Tensor, tf.Graph]],
        weights: Iterable[VariableSpec],
    ):
        self._events = events
        self._weights: dict[str, list[VariableSpec]] = collections.defaultdict(list)
        for spec in weights:
            self._weights[spec.path.rpartition(".")[0]].append(spec)
        marked = {id(e.result): i for i, e in enumerate(events)}
        last_of = {event.result.graph.name: i for i, event in enumerate(events)}
        in_graph = {id(event.result.graph): i for i, event in enumerate(events)}
        for result, traced in loops:
            last_of[result.op.get_attr("body").name] = in_graph[id(traced)]
        self._without_source = self._sources(UpstreamFinder(marked, last_of))
        constant = {i for i in self._without_source if events[i].times == 1}
        marked = {tensor: i for tensor, i in marked.items() if i not in constant}
        self._annotated_upstream = UpstreamFinder(marked, last_of)
        self._lookups = {i: t for i, e in enumerate(events) if (t := self._table(e)) is not None}
        computed = (i for i, e in enumerate(events) if not e.is_annotation or i in self._lookups)
        self._computed_upstream = UpstreamFinder({id(events[i].result): i for i in computed})
        self._seen: set[int] = set()
        self._units: set[str] = set()

    def einsums(self) -> list[Einsum]:
        """Returns einsums and lookups, in the order of computation."""
        read_by_einsums = self._read_by_einsums()
        einsums = []
        for number, event in enumerate(self._events):
            if number in self._lookups:
                einsums.append(self._lookup(event, self._events[self._lookups[number]], number))
            elif not event.is_annotation and len(event.operands) == 2:
                einsums.append(self._einsum(event, is_saved=number not in read_by_einsums))
        used = {path for e in einsums if not e.is_lookup for path in e.weights}
        return [
            dataclasses.replace(e, is_tied=e.is_lookup and bool(used & {*e.weights}))
            for e in einsums
        ]

    def flows(self) -> list[Flow]:
        """Returns the flows between annotated activations."""
        flows = []
        for number, event in enumerate(self._events):
            finder = self._annotated_upstream
            find = finder.before if event.is_annotation else finder.nearest
            for layout, operand in _operands(event):
                target = _tensor(layout, operand)
                if target.is_weight or number in self._lookups:
                    continue
                source = (
                    self._before_loop(number) if number in self._without_source else find(operand)
                )
                if source is not None and not self._result(source[0]).is_weight:
                    before = self._events[source[0]]
                    times, unit = min(before.times, event.times), _unit(event.path)
                    produced = _tensor(*_annotated(before))
                    flows.append(Flow(produced, target, before.path, event.path, times, unit))
        return flows

    def _sources(self, finder: UpstreamFinder) -> set[int]:
        """Returns the indices of annotated activations that come from no recorded tensor.

        In a loop's body these are the arguments of the loop, elsewhere constants.
        """
        return {
            number
            for number, event in enumerate(self._events)
            if event.is_annotation
            and not self._result(number).is_weight
            and finder.before(event.operands[0]) is None
        }

    def _before_loop(self, number: int) -> tuple[int, bool] | None:
        """Returns the last tensor before the loop that has the letters of a loop's argument."""
        event = self._events[number]
        if event.times == 1:
            return None
        found = (
            (earlier, False)
            for earlier, other in reversed([*enumerate(self._events[:number])])
            if other.result.graph is not event.result.graph
            and earlier not in self._without_source
            and _annotated(other)[0] == _annotated(event)[0]
        )
        return next(found, None)

    def _einsum(self, event: recording.Event, is_saved: bool) -> Einsum:
        operands, saved, names = [], [], ()
        for layout, operand in _operands(event):
            tensor = _tensor(layout, operand)
            if tensor.is_weight:
                specs = self._specs(event.path, layout)
                names = tuple(s.path for s in specs)
                unsplit = specs[0].unsplit if specs else ""
                tensor = Tensor(layout, tensor.shape, tensor.dtype, unsplit)
            elif id(operand) not in self._seen:
                self._seen.add(id(operand))
                saved.append(tensor)
            operands.append(tensor)
        result = _tensor(*_annotated(event))
        if is_saved and id(event.result) not in self._seen:
            self._seen.add(id(event.result))
            saved.append(result)
        return Einsum(
            operands=tuple(operands),
            result=result,
            path=event.path,
            times=event.times,
            weights=names,
            unit=_unit(event.path),
            begins_unit=self._begins(_unit(event.path)),
            saved=tuple(saved),
        )

    def _begins(self, unit: str) -> bool:
        is_new = bool(unit) and unit not in self._units
        self._units.add(unit)
        return is_new

    def _lookup(self, event: recording.Event, table: recording.Event, number: int) -> Einsum:
        result, weight = self._result(number), _tensor(*_annotated(table))
        rows = [x for x in weight.layout if x not in result.layout]
        sizes = dict(zip(weight.layout, weight.shape, strict=True))
        ids = "".join(x for x in result.layout if x not in weight.layout)
        shape = tuple(n for x, n in zip(result.layout, result.shape, strict=True) if x in ids)
        one_hot = Tensor(ids + "".join(rows), (*shape, *(sizes[x] for x in rows)), result.dtype)
        return Einsum(
            operands=(one_hot, weight),
            result=result,
            path=event.path,
            times=event.times,
            weights=tuple(s.path for s in self._specs(table.path, weight.layout)),
            saved=(result,),
            is_lookup=True,
        )

    def _table(self, event: recording.Event) -> int | None:
        """Returns the index of the table that an annotated tensor was looked up in; else None."""
        if not event.is_annotation or _tensor(*_annotated(event)).is_weight:
            return None
        source = self._annotated_upstream.before(event.operands[0])
        if source is None or not self._result(source[0]).is_weight:
            return None
        return source[0] if self._events[source[0]].is_annotation else None

    def _read_by_einsums(self) -> set[int]:
        """Returns the indices of results that another einsum reads after elementwise operations.

        The backward pass reads the operand of that einsum in place of the result.
        """
        numbers = set()
        for number, event in enumerate(self._events):
            if event.is_annotation:
                continue
            for layout, operand in _operands(event):
                source = self._computed_upstream.nearest(operand)
                if source and source[1] and source[0] != number:
                    if _positions(layout) == _positions(self._result(source[0]).layout):
                        numbers.add(source[0])
        return numbers

    def _result(self, number: int) -> Tensor:
        return _tensor(*_annotated(self._events[number]))

    def _specs(self, path: str, layout: str) -> list[VariableSpec]:
        return [s for s in self._weights[path] if s.layout.removeprefix("R") == layout]


def _operands(event: recording.Event) -> Iterable[tuple[str, tf.Tensor]]:
    """Returns each operand with its layout."""
    layouts = event.equation.partition("->")[0].split(",")
    return zip(layouts, event.operands, strict=True)


def _annotated(event: recording.Event) -> tuple[str, tf.Tensor]:
    return event.equation.partition("->")[2], event.result


def _positions(layout: str) -> set[str]:
    """Returns the letters, key positions (K) as query positions (L)."""
    return set(layout.replace("K", "L"))


def _tensor(layout: str, tensor: tf.Tensor) -> Tensor:
    return Tensor(layout, tuple(known_sizes(tensor.shape)), tensor.dtype.name)


def _unit(path: str) -> str:
    match = _UNIT.match(path)
    return (match[1] or match[2]) if match else ""
