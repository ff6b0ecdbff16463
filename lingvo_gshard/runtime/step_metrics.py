"""The metrics of a step that may still be running on its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lingvo_gshard.training.run import processes

# The metric that is summed over workers. It weights the others, which are averaged.
_TOKENS = "tokens"


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


class MeanMetrics:
    """Metrics of the workers of all processes: means weighted by tokens, and the sum of tokens."""

    def __init__(self, metrics: Sequence[StepMetrics]):
        """Combines the metrics of this process's workers with those of the other processes."""
        self._metrics = metrics

    def read(self) -> dict[str, float]:
        """Waits for the workers and returns name -> value. All processes must make this call."""
        local = [metrics.read() for metrics in self._metrics]
        rows = [row for rows in processes.gather(local) for row in rows]
        tokens = np.array([row.get(_TOKENS, 1.0) for row in rows])
        weights = tokens / tokens.sum() if tokens.sum() > 0 else np.full(len(rows), 1 / len(rows))
        means = {name: float(weights @ [row[name] for row in rows]) for name in rows[0]}
        return {**means, _TOKENS: float(tokens.sum())} if _TOKENS in means else means
