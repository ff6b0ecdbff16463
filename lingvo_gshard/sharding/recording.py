"""Records the products and annotations of a function while it is traced, for the cost model.

with recording.record() as recorded:
    task.loss(theta, batch)
[event.equation for event in recorded.events]        # ['BLM,MND->BLND', 'BLND->BLND', ...]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from lingvo_gshard.core import context, tf
from lingvo_gshard.core.context import Scope


@dataclasses.dataclass(frozen=True)
class Event:
    """One einsum or annotation.

    Attributes:
      equation: Layouts of the operands, "->", and the layout of the result.
      operands: The operands. An annotation has one.
      times: How often it runs: the number of iterations in a compiled loop, otherwise 1.
    """

    equation: str
    operands: tuple[tf.Tensor, ...]
    result: tf.Tensor
    path: str
    times: int
    is_annotation: bool


@dataclasses.dataclass
class Recorded:
    """The events of a traced function.

    Attributes:
      events: Einsums and annotations in the order of tracing.
      loops: (result, graph) of each loop whose body is a copy of another traced graph.
      graph: The function's graph; None until it is traced completely.
    """

    events: list[Event] = dataclasses.field(default_factory=list)
    loops: list[tuple[tf.Tensor, tf.Graph]] = dataclasses.field(default_factory=list)
    graph: tf.Graph | None = None

    @property
    def graphs(self) -> list[tf.Graph]:
        """The function's graph, the traced graphs of loop bodies, and copies of these graphs."""
        bodies = [body for _, body in self.loops]
        found = [self.graph, *(event.result.graph for event in self.events), *bodies]
        return list({id(graph): graph for graph in found if graph is not None}.values())


_scope: Scope[Recorded | None] = Scope("recorded", None)


@contextlib.contextmanager
def record() -> Iterator[Recorded]:
    """Records what is traced inside a `with` block."""
    recorded = Recorded()
    with _scope.use(recorded):
        yield recorded


def add(
    equation: str, operands: tuple[tf.Tensor, ...], result: tf.Tensor, is_annotation: bool = False
) -> None:
    """Records one einsum or annotation, if a recording is under way."""
    recorded = _scope.get()
    now = context.current()
    if recorded is None or now.is_recomputing:
        return
    iteration, times = now.iteration, 1
    if iteration is not None and not isinstance(iteration.index, int):
        times = iteration.repetition.times
    event = Event(equation, operands, result, now.layer_path, times, is_annotation)
    recorded.events.append(event)


def add_loop(result: tf.Tensor, body: tf.Graph) -> None:
    """Records a loop, if a recording is under way."""
    recorded = _scope.get()
    if recorded is not None:
        recorded.loops.append((result, body))


def set_graph(graph: tf.Graph) -> None:
    """Records the graph of the traced function, if a recording is under way."""
    recorded = _scope.get()
    if recorded is not None:
        recorded.graph = graph


# Stands for the axes of an annotation that names devices.
ANY_AXIS = "*"

_axes: Scope[set[str] | None] = Scope("noted_axes", None)


@contextlib.contextmanager
def noting_axes() -> Iterator[set[str]]:
    """Collects the mesh axes that annotations inside a `with` block split tensors over.

    An annotation that names devices instead of axes adds `ANY_AXIS`.
    """
    found: set[str] = set()
    with _axes.use(found):
        yield found


def note_axes(axes: Iterable[str]) -> None:
    """Adds the axes of an annotation, if they are collected."""
    found = _axes.get()
    if found is not None:
        found.update(axes)
