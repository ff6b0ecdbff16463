"""Reading a part of a tensor, and writing it in place, where only the data tell its beginning.

For `tf.slice` TensorFlow's compiler first tries to find the beginning while compiling, and to that
end computes all that it depends on: of a row that a router chose, the whole model before it.
"""

from __future__ import annotations

import tensorflow as tf

try:
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops
except ImportError as error:
    raise ImportError(
        f"TensorFlow {tf.__version__} no longer has its private module {error.name}. "
        "lingvo_gshard/core/dynamic_slice.py needs it."
    ) from error


def read(tensor: tf.Tensor, start: tf.Tensor | int, count: int) -> tf.Tensor:
    """Returns `count` slices of the tensor from `start` on; it has no gradient.

    Where they would reach beyond the end they are those before it, as StableHLO says of
    dynamic_slice, https://openxla.org/stablehlo/spec.
    """
    starts = [start] + [0] * (tensor.shape.rank - 1)
    sizes = [count, *tensor.shape[1:]]
    part = gen_xla_ops.xla_dynamic_slice(tensor, tf.stack(starts), tf.constant(sizes, tf.int32))
    part.set_shape(sizes)
    return part


def write(tensor: tf.Tensor, part: tf.Tensor, start: tf.Tensor | int) -> tf.Tensor:
    """Returns the tensor with `part` in place of its slices from `start` on, of equal other sizes.

    Where the part would reach beyond the end it is moved forward, as StableHLO says of
    dynamic_update_slice, https://openxla.org/stablehlo/spec.
    """
    starts = [start] + [0] * (tensor.shape.rank - 1)
    return gen_xla_ops.xla_dynamic_update_slice(tensor, part, tf.stack(starts))
