"""Gradients written out by hand, under the name of their layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from lingvo_gshard.core import context


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
