"""Static shapes of tensors.

For `tf.slice` TensorFlow's compiler tries to evaluate the start index at compile time, together
with everything it depends on. If a router computes the index, that is the model before the router.
"""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.lazy import gen_xla_ops, tf


def known_sizes(shape: tf.TensorShape | Sequence[int]) -> list[int]:
    """Returns the sizes of a shape, of a tensor or an array, whose dimensions are all known.

    Raises:
      ValueError: A size is unknown.
    """
    sizes = [size for size in shape if size is not None]
    if len(sizes) < len(shape):
        raise ValueError(f"The shape {shape} has unknown sizes")
    return sizes


def read_slice(
    tensor: tf.Tensor, start: tf.Tensor | int, count: int, dimension: int = 0
) -> tf.Tensor:
    """Returns `count` elements of one dimension from index `start` on, without a gradient.

    A start index past the last full slice is clamped, as in StableHLO's dynamic_slice
    (https://openxla.org/stablehlo/spec).
    """
    starts = [start if d == dimension else 0 for d in range(tensor.shape.rank)]
    sizes = [count if d == dimension else size for d, size in enumerate(known_sizes(tensor.shape))]
    part = gen_xla_ops.xla_dynamic_slice(tensor, tf.stack(starts), tf.constant(sizes, tf.int32))
    part.set_shape(sizes)
    return part


def write_slice(
    tensor: tf.Tensor, part: tf.Tensor, start: tf.Tensor | int, dimension: int = 0
) -> tf.Tensor:
    """Returns the tensor with `part` written from index `start` of one dimension on.

    XLA writes in place if nothing else reads the tensor. A start index past the last full slice is
    clamped, as in StableHLO's dynamic_update_slice (https://openxla.org/stablehlo/spec).
    """
    starts = [start if d == dimension else 0 for d in range(tensor.shape.rank)]
    written = gen_xla_ops.xla_dynamic_update_slice(tensor, part, tf.stack(starts))
    written.set_shape(tensor.shape)
    return written
