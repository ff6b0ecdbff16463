"""Static shapes of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.lazy import tf


def known_sizes(shape: tf.TensorShape | Sequence[int]) -> list[int]:
    """Returns the sizes of a shape, of a tensor or an array, whose dimensions are all known.

    Raises:
      ValueError: A size is unknown.
    """
    sizes = [size for size in shape if size is not None]
    if len(sizes) < len(shape):
        raise ValueError(f"The shape {shape} has unknown sizes")
    return sizes
