"""Hand-written gradients that compute for the layer and under the partitioning of their call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import gen_xla_ops, ops, tf


def custom_gradient(function: Callable[..., tuple[Any, Callable]]) -> Callable:
    """Decorates a function like tf.custom_gradient; its gradient belongs to the place of the call.

    TensorFlow computes custom gradients when the tape evaluates them, outside of all layers and
    manual regions. This decorator gives the gradient the layer path and the partitioning of the
    call: in a manual region, annotations have no effect. The operations of the gradient are named
    `gradient_tape/<name scope of the call>/...`, as in the gradients of TensorFlow's own ops.

    Args:
      function: Returns a result and a function from the result's gradients to the arguments'.
    """

    @functools.wraps(function)
    def named(*args: Any) -> tuple[Any, Callable]:
        place, scope = context.captured(), tf.get_current_name_scope()
        result, gradient = function(*args)

        def named_gradient(*upstream: tf.Tensor) -> Any:
            name = f"gradient_tape/{scope}/" if scope else "gradient_tape/"
            with place(), tf.name_scope(name):
                return gradient(*upstream)

        return result, named_gradient

    return tf.custom_gradient(named)


@contextlib.contextmanager
def forgetting_gradients() -> Iterator[None]:
    """Releases the custom gradients of functions traced inside a `with` block when it ends.

    Use it for graphs that are never differentiated afterwards. TensorFlow keeps the gradient of
    every tf.custom_gradient call in a graph, and with it the graph, as long as the process lives.
    For the step of a small Transformer that is 100 MiB.
    """
    registered = ops.gradient_registry._registry
    before = set(registered)
    try:
        yield
    finally:
        for name in set(registered) - before:
            del registered[name]


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
