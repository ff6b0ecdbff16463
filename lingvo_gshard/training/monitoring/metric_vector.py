"""The metrics of a step as it leaves the device: one vector, and the names of its numbers."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from lingvo_gshard.core.repetition import unstacked

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


def with_weights(pairs: dict[str, tuple[tf.Tensor, tf.Tensor]]) -> Named:
    """Yields the values of metrics by name, then their weights; that of `loss` as `loss weight`."""
    yield from ((name, value) for name, (value, _) in pairs.items())
    yield from ((f"{name} weight", weight) for name, (_, weight) in pairs.items())
