"""Metrics of a step as one vector, and measurements of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from lingvo_gshard.core import NestedMap, known_sizes, tf
from lingvo_gshard.core.repetition import unstacked
from lingvo_gshard.training.step.gradients import TensorBatch

# Maps a metric's name to (value, weight); the mean over batches weights values by their weights.
WeightedMetrics = dict[str, tuple[float, float]]
Named: TypeAlias = "Iterable[tuple[str, tf.Tensor]]"

# Maps the weights before a step and arrays to tensors by name.
Measurement: TypeAlias = "Callable[[NestedMap, TensorBatch], dict[str, tf.Tensor]]"
# Waits for what a measurement computes and returns it by name.
ReadMeasured: TypeAlias = "Callable[[], dict[str, np.ndarray]]"

# Marks the name of a metric's weight.
_WEIGHT = " weight"


def metric_vector(metrics: Named) -> tuple[list[str], tf.Tensor]:
    """Returns the names of the metrics and a float32 vector of their values.

    Args:
      metrics: pairs (name, scalar). Repeated layers have pairs (name, vector), whose elements are
        named after the layers.
    """
    names: list[str] = []
    parts = []
    for name, value in metrics:
        names += unstacked(name, known_sizes(value.shape)[0]) if value.shape.rank else [name]
        parts.append(tf.reshape(value, [-1]))
    return names, tf.concat(parts, 0) if parts else tf.zeros([0])


def values_and_weights(pairs: dict[str, tuple[tf.Tensor, tf.Tensor]]) -> Named:
    """Yields each metric's value by name, then each weight, named `<name> weight`."""
    yield from ((name, value) for name, (value, _) in pairs.items())
    yield from ((f"{name}{_WEIGHT}", weight) for name, (_, weight) in pairs.items())


def pair_with_weights(metrics: dict[str, float]) -> WeightedMetrics:
    """Returns name -> (value, weight) from metrics named by `values_and_weights`."""
    return {
        name: (value, metrics[name + _WEIGHT])
        for name, value in metrics.items()
        if not name.endswith(_WEIGHT)
    }


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
