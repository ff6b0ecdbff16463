"""Gradients written out by hand, under the name of their layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from lingvo_gshard.core import context

try:
    from tensorflow.python.framework.ops import gradient_registry
except ImportError as error:
    raise ImportError(
        f"TensorFlow {tf.__version__} no longer has its private {error.name}'s gradient_registry. "
        "lingvo_gshard/core/autodiff/custom_gradient.py is the one file that needs it."
    ) from error


def custom_gradient(function: Callable[..., tuple[Any, Callable]]) -> Callable:
    """tf.custom_gradient whose gradient is named for the layer that called the function.

    TensorFlow computes such a gradient when the tape is asked, outside of all layers. Here it has
    the layer's path for `context.layer_path()`, and `gradient_tape/` and the name scope of the
    call for its own, as the gradients of TensorFlow's operations have.
    """

    @functools.wraps(function)
    def named(*args: Any) -> tuple[Any, Callable]:
        path, scope = context.layer_path(), tf.get_current_name_scope()
        result, gradient = function(*args)

        def within_layer(*upstream: tf.Tensor) -> Any:
            name = f"gradient_tape/{scope}/" if scope else "gradient_tape/"
            with context.layer(path), tf.name_scope(name):
                return gradient(*upstream)

        return result, within_layer

    return tf.custom_gradient(named)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Within it, functions are traced whose graphs nobody will differentiate afterwards.

    TensorFlow keeps the gradient of each call of a tf.custom_gradient function in a graph, and
    with it the graph, for as long as the process lives: 100 MiB of a small Transformer's step.
    """
    kept = gradient_registry._registry
    before = set(kept)
    try:
        yield
    finally:
        for name in set(kept) - before:
            del kept[name]
