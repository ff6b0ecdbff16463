"""Packs the metrics of a step into one vector, which leaves the device in one transfer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.repetition import unstacked

# Marks the name of a metric's weight.
_WEIGHT = " weight"

Named: TypeAlias = "Iterable[tuple[str, tf.Tensor]]"


def metric_vector(metrics: Named) -> tuple[list[str], tf.Tensor]:
    """Returns the names of the metrics and a float32 vector of their values.

    Args:
      metrics: pairs (name, scalar). Repeated layers have pairs (name, vector), whose elements are
        named after the layers.
    """
    names: list[str] = []
    parts = []
    for name, value in metrics:
        names += unstacked(name, value.shape[0]) if value.shape.rank else [name]
        parts.append(tf.reshape(value, [-1]))
    return names, tf.concat(parts, 0) if parts else tf.zeros([0])


def values_and_weights(pairs: dict[str, tuple[tf.Tensor, tf.Tensor]]) -> Named:
    """Yields each metric's value by name, then each weight, named `<name> weight`."""
    yield from ((name, value) for name, (value, _) in pairs.items())
    yield from ((f"{name}{_WEIGHT}", weight) for name, (_, weight) in pairs.items())


def pair_with_weights(metrics: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Returns name -> (value, weight) from metrics named by `values_and_weights`."""
    return {
        name: (value, metrics[name + _WEIGHT])
        for name, value in metrics.items()
        if not name.endswith(_WEIGHT)
    }
