"""Scope: a value that is visible to all code called inside a `with` block.

Only this module defines ambient state. There are four scopes: the context of the current forward
pass (core/context.py), its partitioning (sharding/partitioning.py), what is recorded of it
(sharding/recording.py), and how plans are compiled (planning/compiling/cache.py).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Scope(Generic[Value]):
    """A value of one type, separate for every thread.

    Args:
      name: Name for debugging.
      default: The value outside of every `use` block.
    """

    def __init__(self, name: str, default: Value):
        self._variable: contextvars.ContextVar[Value] = contextvars.ContextVar(
            name, default=default
        )

    def get(self) -> Value:
        """Returns the value of the innermost `use` block."""
        return self._variable.get()

    @contextlib.contextmanager
    def use(self, value: Value) -> Iterator[Value]:
        """Sets the value inside a `with` block."""
        token = self._variable.set(value)
        try:
            yield value
        finally:
            self._variable.reset(token)
