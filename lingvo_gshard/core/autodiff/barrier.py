"""A barrier that XLA does not look behind."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

try:
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops
except ImportError as error:
    raise ImportError(
        f"TensorFlow {tf.__version__} no longer has its private module {error.name}. "
        "lingvo_gshard/core/autodiff/barrier.py is the one file that needs it."
    ) from error


def optimization_barrier(*groups: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Returns the groups of tensors as they are, but XLA computes nothing across.

    It does not see that what follows was computed before, and begins nothing that follows before
    all of them are there. Defined by StableHLO, https://openxla.org/stablehlo/spec.
    """
    tensors = [tensor for group in groups for tensor in group]
    passed = iter(gen_xla_ops.xla_optimization_barrier(tensors))
    return [[next(passed) for _ in group] for group in groups]
