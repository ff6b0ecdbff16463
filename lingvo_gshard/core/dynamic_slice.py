"""Reads and writes slices of tensors whose start index is known only at run time.

For `tf.slice` TensorFlow's compiler tries to evaluate the start index at compile time, together
with everything it depends on. If a router computes the index, that is the model before the router.
"""

from __future__ import annotations

from lingvo_gshard.core.lazy import gen_xla_ops, tf
from lingvo_gshard.core.shapes import known_sizes


def read(tensor: tf.Tensor, start: tf.Tensor | int, count: int, dimension: int = 0) -> tf.Tensor:
    """Returns `count` elements of one dimension from index `start` on, without a gradient.

    A start index past the last full slice is clamped, as in StableHLO's dynamic_slice
    (https://openxla.org/stablehlo/spec).
    """
    starts = [start if d == dimension else 0 for d in range(tensor.shape.rank)]
    sizes = [count if d == dimension else size for d, size in enumerate(known_sizes(tensor.shape))]
    part = gen_xla_ops.xla_dynamic_slice(tensor, tf.stack(starts), tf.constant(sizes, tf.int32))
    part.set_shape(sizes)
    return part


def write(
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
