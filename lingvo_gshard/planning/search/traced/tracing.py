"""Tracing a task once for the cost model: nothing is compiled, so it may be of any size."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.planning.search.traced.ancestry import Ancestry
from lingvo_gshard.planning.search.traced.graph import Flow, Product, Tensor, Traced
from lingvo_gshard.sharding import recording
from lingvo_gshard.sharding.partitioning import use_partitioning
from lingvo_gshard.sharding.recording import Event
from lingvo_gshard.training.trainer import Trainer

# A loop's body, or one layer of a list: what rematerialization computes again as a whole.
_UNIT = re.compile(r"(.*?\.body)\[|(.*?\[\d+\])")

# The name scope of gradients.
_GRADIENT = "gradient_tape/"


def trace(trainer: Trainer, batch: dict[str, tf.TensorSpec]) -> Traced:
    """Traces a trainer's loss, without a mesh, on batches of these specs."""
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
        reader = _Reader(_of_loops_once(recorded.events), recorded.loops, weights)
        products, flows = reader.products(), reader.flows()
    del concrete
    moments = collections.defaultdict(tuple)
    for moment in trainer.optimizer.moment_specs(specs).flatten():
        moments[moment.path.rpartition("/")[0]] += (moment,)
    inputs = sum(math.prod(s.shape.as_list()) * s.dtype.size for s in batch.values())
    layers = tuple(trainer.task.layer_paths())
    return Traced(tuple(products), tuple(flows), tuple(weights), dict(moments), layers, inputs)


def _of_loops_once(events: list[Event]) -> list[Event]:
    """The events without those of a loop's body that was traced before, to learn what it returns.

    And without stacks of what a loop keeps, which no layer reads, an einsum's own annotation, and
    gradients, which a loop is traced with.
    """
    events = [event for event in events if _GRADIENT not in event.result.op.name]
    by_graph: dict[int, list[Event]] = {}
    for event in events:
        by_graph.setdefault(id(event.result.graph), []).append(event)
    last = {
        tuple((e.equation, e.path) for e in of_graph): graph for graph, of_graph in by_graph.items()
    }
    computed = {id(e.result) for e in events if not e.is_annotation}
    return [
        e
        for e in events
        if id(e.result.graph) in last.values()
        and "R" not in e.equation
        and not (e.is_annotation and id(e.result) in computed)
    ]


class _Reader:
    """Makes products and flows of a trace's events, while its graph is there."""

    def __init__(
        self,
        events: list[Event],
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
        self._begun = self._beginnings(Ancestry(marked, last_of))
        constant = {i for i in self._begun if events[i].times == 1}
        marked = {tensor: i for tensor, i in marked.items() if i not in constant}
        self._marked = Ancestry(marked, last_of)
        self._lookups = {i: t for i, e in enumerate(events) if (t := self._table(e)) is not None}
        computed = {
            id(e.result): i
            for i, e in enumerate(events)
            if not e.is_annotation or i in self._lookups
        }
        self._computed = Ancestry(computed)
        self._seen: set[int] = set()
        self._units: set[str] = set()

    def products(self) -> list[Product]:
        """Returns the products, in the order of computation."""
        read_on = self._read_on()
        found = []
        for number, event in enumerate(self._events):
            if number in self._lookups:
                found.append(self._lookup(event, self._events[self._lookups[number]], number))
            elif not event.is_annotation and len(event.operands) == 2:
                found.append(self._product(event, is_saved=number not in read_on))
        used = {path for p in found if not p.is_lookup for path in p.weights}
        return [
            dataclasses.replace(p, is_tied=p.is_lookup and bool(used & {*p.weights})) for p in found
        ]

    def flows(self) -> list[Flow]:
        """Returns the flows between marked tensors of the batch, those that change nothing too."""
        found = []
        for number, event in enumerate(self._events):
            layouts = event.equation.partition("->")[0].split(",")
            for layout, operand in zip(layouts, event.operands, strict=True):
                target = _tensor(layout, operand)
                if target.is_weight or number in self._lookups:
                    continue
                near = self._marked.before if event.is_annotation else self._marked.nearest
                source = self._handed_in(number) if number in self._begun else near(operand)
                if source is not None and not self._result(source[0]).is_weight:
                    found.append(self._flow(self._events[source[0]], target, event))
        return found

    def _beginnings(self, ancestry: Ancestry) -> set[int]:
        """Numbers of annotations of what no recorded tensor came before, in their graph.

        In a loop's body it is what the loop is given, elsewhere a constant, such as positions'.
        """
        return {
            number
            for number, event in enumerate(self._events)
            if event.is_annotation
            and not self._result(number).is_weight
            and ancestry.before(event.operands[0]) is None
        }

    def _handed_in(self, number: int) -> tuple[int, bool] | None:
        """The last tensor of these letters that was recorded before the loop."""
        event = self._events[number]
        if event.times == 1:
            return None
        for earlier in range(number - 1, -1, -1):
            other = self._events[earlier]
            is_outside = other.result.graph is not event.result.graph
            if is_outside and earlier not in self._begun and _marked(other)[0] == _marked(event)[0]:
                return earlier, False
        return None

    def _flow(self, source: Event, target: Tensor, event: Event) -> Flow:
        marked = _tensor(source.equation.partition("->")[2], source.result)
        times = min(source.times, event.times)
        return Flow(marked, target, source.path, event.path, times, _unit(event.path))

    def _product(self, event: Event, is_saved: bool) -> Product:
        layouts = event.equation.partition("->")[0].split(",")
        operands, saved, names = [], [], ()
        for layout, operand in zip(layouts, event.operands, strict=True):
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
        result = _tensor(event.equation.partition("->")[2], event.result)
        if is_saved and id(event.result) not in self._seen:
            self._seen.add(id(event.result))
            saved.append(result)
        return Product(
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

    def _lookup(self, event: Event, table: Event, number: int) -> Product:
        result, found = (
            self._result(number),
            _tensor(table.equation.partition("->")[2], table.result),
        )
        rows = [x for x in found.layout if x not in result.layout]
        sizes = dict(zip(found.layout, found.shape, strict=True))
        ids = "".join(x for x in result.layout if x not in found.layout)
        shape = tuple(n for x, n in zip(result.layout, result.shape, strict=True) if x in ids)
        one_hot = Tensor(ids + "".join(rows), (*shape, *(sizes[x] for x in rows)), result.dtype)
        return Product(
            operands=(one_hot, found),
            result=result,
            path=event.path,
            times=event.times,
            weights=tuple(s.path for s in self._specs(table.path, found.layout)),
            saved=(result,),
            is_lookup=True,
        )

    def _table(self, event: Event) -> int | None:
        """The number of the marked table that an annotation's rows were looked up in."""
        if not event.is_annotation or _tensor(*_marked(event)).is_weight:
            return None
        source = self._marked.before(event.operands[0])
        if source is None or not self._result(source[0]).is_weight:
            return None
        return source[0] if self._events[source[0]].is_annotation else None

    def _read_on(self) -> set[int]:
        """Numbers of results that products read after at most elementwise operations.

        Of such a tensor the backward pass reads what the product does.
        """
        numbers = set()
        for number, event in enumerate(self._events):
            if event.is_annotation:
                continue
            layouts = event.equation.partition("->")[0].split(",")
            for layout, operand in zip(layouts, event.operands, strict=True):
                source = self._computed.nearest(operand)
                if source and source[1] and source[0] != number:
                    if _positions(layout) == _positions(self._result(source[0]).layout):
                        numbers.add(source[0])
        return numbers

    def _result(self, number: int) -> Tensor:
        return _tensor(*_marked(self._events[number]))

    def _specs(self, path: str, layout: str) -> list[VariableSpec]:
        return [s for s in self._weights[path] if s.layout.removeprefix("R") == layout]


def _marked(event: Event) -> tuple[str, tf.Tensor]:
    return event.equation.partition("->")[2], event.result


def _positions(layout: str) -> set[str]:
    """The letters; positions are keys' in one tensor and queries' in another."""
    return set(layout.replace("K", "L"))


def _tensor(layout: str, tensor: tf.Tensor) -> Tensor:
    return Tensor(layout, tuple(tensor.shape.as_list()), tensor.dtype.name)


def _unit(path: str) -> str:
    match = _UNIT.match(path)
    return (match[1] or match[2]) if match else ""
