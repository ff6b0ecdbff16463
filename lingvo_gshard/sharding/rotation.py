"""Rotation: every slice of a tensor one place on, and the last ones to the front."""

import tensorflow as tf


def rotated(x: tf.Tensor, dimension: int, shift: int = 1) -> tf.Tensor:
    """Returns x with what was at i, along a dimension, at i + shift, around its end.

    Where that dimension is split over devices, one slice each, it is a collective-permute: the one
    form in which XLA finds that, not tf.roll and not a gather.
    """
    before = (slice(None),) * dimension
    last, rest = x[(*before, slice(-shift, None))], x[(*before, slice(None, -shift))]
    return tf.concat([last, rest], dimension)
