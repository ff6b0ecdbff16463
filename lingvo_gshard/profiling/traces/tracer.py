"""Tracer: what records traces, whichever library runs the steps. All write XSpace files."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Protocol

import numpy as np


class Tracer(Protocol):
    """Records a trace at a time."""

    def start(self) -> None:
        """Starts to record."""
        ...

    def stop(self) -> bytes:
        """Stops and returns the trace as a serialized XSpace."""
        ...

    def span(self, name: str, step: int) -> contextlib.AbstractContextManager[object]:
        """Returns a context that the trace shows as a span of the host."""
        ...

    def chip_key(self) -> str:
        """Returns the chip's key in planning/machines, "cpu" for CPUs, "" for unknown chips."""
        ...

    def product(self, size: int) -> Callable[[], object] | None:
        """Returns a call that computes a float32 product of square matrices on one device.

        Args:
          size: their rows and columns.

        Returns:
          None if the library cannot compute on a single device.
        """
        ...


def matrix(size: int) -> np.ndarray:
    """Returns a square float32 matrix of random numbers."""
    return np.random.default_rng(0).standard_normal((size, size), np.float32)


def only_trace(directory: str) -> bytes:
    """Returns the only trace in a directory, a serialized XSpace."""
    (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
    return path.read_bytes()
