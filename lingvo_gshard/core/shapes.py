"""Static shapes of tensors."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf


def known_sizes(shape: tf.TensorShape) -> list[int]:
    """Returns the sizes of a shape whose dimensions are all known.

    Raises:
      ValueError: A size is unknown.
    """
    sizes = [size for size in shape.as_list() if size is not None]
    if len(sizes) < len(shape):
        raise ValueError(f"The shape {shape} has unknown sizes")
    return sizes
