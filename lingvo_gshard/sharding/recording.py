"""Recording: every product and annotation of a function while it is traced, for who plans it.

with recording.record() as events:
    task.loss(theta, batch)
[event.equation for event in events]        # ['BLM,MND->BLND', 'BLND->BLND', ...]
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from lingvo_gshard.core import context


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


_events: contextvars.ContextVar[list[Event] | None] = contextvars.ContextVar("events", default=None)


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
    """Collects the events of what is traced within it, in the order of tracing."""
    events: list[Event] = []
    token = _events.set(events)
    try:
        yield events
    finally:
        _events.reset(token)


def add(
    equation: str, operands: tuple[tf.Tensor, ...], result: tf.Tensor, is_annotation: bool = False
) -> None:
    """Records one einsum or annotation, where somebody records."""
    events = _events.get()
    if events is None or context.recomputing():
        return
    iteration = context.current().iteration
    is_loop = iteration is not None and not isinstance(iteration.index, int)
    times = iteration.repetition.times if is_loop else 1
    path = context.layer_path()
    events.append(Event(equation, operands, result, path, times, is_annotation))
