"""The metrics of a step as it leaves the device: one vector, and the names of its numbers."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from lingvo_gshard.core.repetition import unstacked

# Marks the name of a metric's weight.
_WEIGHT = " weight"

Named = Iterable[tuple[str, tf.Tensor]]


def metric_vector(metrics: Named) -> tuple[list[str], tf.Tensor]:
    """Returns names and a float32 vector of as many numbers.

    metrics: (name, scalar), and of layers that are one loop (name, vector), whose numbers get the
    names of the layers.
    """
    names: list[str] = []
    parts = []
    for name, value in metrics:
        names += unstacked(name, value.shape[0]) if value.shape.rank else [name]
        parts.append(tf.reshape(value, [-1]))
    return names, tf.concat(parts, 0) if parts else tf.zeros([0])


def values_and_weights(pairs: dict[str, tuple[tf.Tensor, tf.Tensor]]) -> Named:
    """Yields the values of metrics by name, then their weights; that of `loss` as `loss weight`."""
    yield from ((name, value) for name, (value, _) in pairs.items())
    yield from ((f"{name}{_WEIGHT}", weight) for name, (_, weight) in pairs.items())


def pair_with_weights(metrics: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Returns name -> (value, weight) from metrics named by `values_and_weights`."""
    return {
        name: (value, metrics[name + _WEIGHT])
        for name, value in metrics.items()
        if not name.endswith(_WEIGHT)
    }
