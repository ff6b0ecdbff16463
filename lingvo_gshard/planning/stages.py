"""Stages: what the planner is at, told to whoever shows it; planning takes a minute or more."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

Listener = Callable[[str], None]

_listener: contextvars.ContextVar[Listener | None] = contextvars.ContextVar(
    "listener", default=None
)


@contextlib.contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Within it, the listener is called with each stage that begins, in words."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def begin(stage: str) -> None:
    """Says that a stage begins, such as "compiling for v3:16x16"."""
    listener = _listener.get()
    if listener is not None:
        listener(stage)
