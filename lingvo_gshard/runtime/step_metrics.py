"""The metrics of a step that may still be running on its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


class StepMetrics:
    """Names of metrics, and a vector of their values that is read when it is needed."""

    def __init__(self, names: Sequence[str], read_values: Callable[[], np.ndarray]):
        """Wraps the metrics of one step.

        Args:
          names: a name for each element of the vector.
          read_values: waits for the step and returns the float32 vector.
        """
        self._names = names
        self._read_values = read_values

    def read(self) -> dict[str, float]:
        """Waits for the step and returns name -> value, the float32 that the step computed."""
        return dict(zip(self._names, self._read_values().tolist(), strict=True))
