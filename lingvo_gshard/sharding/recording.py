"""Recording: every product and annotation of a function while it is traced, for who plans it.

with recording.record() as recorded:
    task.loss(theta, batch)
[event.equation for event in recorded.events]        # ['BLM,MND->BLND', 'BLND->BLND', ...]
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.sharding import scope


@dataclasses.dataclass(frozen=True)
class Event:
    """An einsum or, with is_annotation, what `annotate` marked.

    equation: letters of the operands, "->", and those of the result.
    path: of the layer that computes it. times: how often it runs; in a compiled loop, that of it.
    """

    equation: str
    operands: tuple[tf.Tensor, ...]
    result: tf.Tensor
    path: str
    times: int
    is_annotation: bool


@dataclasses.dataclass
class Recorded:
    """Events in the order of tracing, and what loops return with the graph they were traced in.

    Those whose body is a copy of that graph; other loops name theirs themselves.
    """

    events: list[Event] = dataclasses.field(default_factory=list)
    loops: list[tuple[tf.Tensor, tf.Graph]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def record() -> Iterator[Recorded]:
    """Collects what is traced within it."""
    recorded = Recorded()
    with scope.override(recorded=recorded):
        yield recorded


def add(
    equation: str, operands: tuple[tf.Tensor, ...], result: tf.Tensor, is_annotation: bool = False
) -> None:
    """Records one einsum or annotation, where somebody records."""
    recorded = scope.current().recorded
    now = context.current()
    if recorded is None or now.is_recomputing:
        return
    iteration = now.iteration
    is_loop = iteration is not None and not isinstance(iteration.index, int)
    times = iteration.repetition.times if is_loop else 1
    event = Event(equation, operands, result, now.layer_path, times, is_annotation)
    recorded.events.append(event)


def add_loop(result: tf.Tensor, body: tf.Graph) -> None:
    """Records what a loop returns, where somebody records, and the graph its body was traced in."""
    recorded = scope.current().recorded
    if recorded is not None:
        recorded.loops.append((result, body))
