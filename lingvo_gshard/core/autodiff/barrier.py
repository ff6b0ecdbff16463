"""Optimization barriers: XLA does not move or merge computations across them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lingvo_gshard.core.lazy import gen_xla_ops, tf


def optimization_barrier(*groups: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Passes groups of tensors through one optimization barrier.

    XLA does not merge computations after the barrier with equal ones before it. It starts nothing
    that reads a result of the barrier until all tensors of all groups are computed. Semantics:
    optimization_barrier in https://openxla.org/stablehlo/spec.
    """
    tensors = [tensor for group in groups for tensor in group]
    # The generated op has no return type.
    results = cast(list[tf.Tensor], gen_xla_ops.xla_optimization_barrier(tensors))
    passed = iter(results)
    return [[next(passed) for _ in group] for group in groups]
