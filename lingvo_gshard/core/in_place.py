"""Writing into a part of a tensor, which XLA does in place where nobody reads the old one."""

from __future__ import annotations

import tensorflow as tf

try:
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops
except ImportError as error:
    raise ImportError(
        f"TensorFlow {tf.__version__} no longer has its private module {error.name}. "
        "lingvo_gshard/core/in_place.py needs it."
    ) from error


def write(tensor: tf.Tensor, part: tf.Tensor, start: tf.Tensor | int) -> tf.Tensor:
    """Returns the tensor with `part` in place of its slices from `start` on, of equal other sizes.

    Where the part would reach beyond the end it is moved forward, as StableHLO says of
    dynamic_update_slice, https://openxla.org/stablehlo/spec.
    """
    starts = [start] + [0] * (tensor.shape.rank - 1)
    return gen_xla_ops.xla_dynamic_update_slice(tensor, part, tf.stack(starts))
