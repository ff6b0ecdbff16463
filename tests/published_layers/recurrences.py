"""What holds for each layer with a state: caches and chunks are single steps over tokens."""

import types

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.inference.layers import cached, decoding_weights, extend, state_shapes
from lingvo_gshard.wings.published_layers.recurrence import Recurrence


def view(positions: np.ndarray) -> cached.CacheView:
    """Returns what one token of each row sees at these positions [B]."""
    positions = tf.constant(np.asarray(positions, np.int32)[:, None])
    nothing = tf.zeros([len(positions), 1, 1], tf.bool)
    return cached.CacheView(positions, nothing, tf.zeros([1, 1], tf.int32), tf.constant(0))


def check_chunks(
    rule: types.ModuleType, arrays: list[np.ndarray], starts: np.ndarray, size: int
) -> None:
    """Checks a rule's outputs, last states and gradients against those of its single steps.

    Chunks have gradients of their own; steps have those of TensorFlow.

    Args:
      rule: the module of the rule.
      arrays: the rule's Inputs, values third.
      starts: [B,L], whether a token begins a text.
      size: positions of a chunk.
    """
    arrays = [tf.constant(x, tf.float32) for x in arrays]
    weights = tf.constant(np.random.default_rng(5).normal(size=arrays[2].shape), tf.float32)

    def chunks(*inputs):
        return rule.run_rows(rule.Inputs(*inputs), tf.constant(starts), size)

    def steps(*inputs):
        state, read = tf.zeros_like(chunks(*arrays)[1]), []
        for index in range(starts.shape[1]):
            token = rule.Inputs(*(x[:, index] for x in inputs))
            is_old = tf.constant(~starts[:, index], tf.float32)[:, None, None, None, None]
            one, state = rule.run_step(token, state * is_old)
            read.append(one)
        return tf.stack(read, 1), state

    def gradients(function):
        with tf.GradientTape() as tape:
            tape.watch(arrays)
            read, state = function(*arrays)
            loss = tf.reduce_sum(read * weights) + tf.reduce_sum(tf.sin(state))
        return [read, state, *tape.gradient(loss, arrays)]

    for one, other in zip(gradients(chunks), gradients(steps), strict=True):
        assert_close(one.numpy(), other.numpy(), "float32")


def check_cache(layer: Recurrence, theta: NestedMap, x: np.ndarray) -> None:
    """Checks two rows, token by token with a cache, against whole rows.

    Args:
      x: the rows [2,L,M], with L at least 9.
    """
    whole = layer.fprop(theta, tf.constant(x), layer.mask(None)).numpy()
    weights = decoding_weights(layer, theta)
    # Row 0 has two tokens of padding before its text.
    is_token = np.arange(4)[None] >= np.array([[2], [0]])
    first = np.stack([np.concatenate([x[0, -2:], x[0, :2]]), x[1, :4]])
    rows = cached.row_view(tf.constant(is_token), is_causal=True)
    y, cache = extend(layer, weights, tf.constant(first), rows, None)
    assert_close(y[0, 2:].numpy(), whole[0, :2], "float32")
    shapes = {name: tuple(value.shape) for name, value in cache.items()}
    assert shapes == state_shapes(layer, *x.shape[:2])
    for step in range(5):
        at = np.array([2, 4]) + step
        token = tf.constant(x[[0, 1], at][:, None])
        y, cache = extend(layer, weights, token, view(at), None, cache)
        assert_close(y[:, 0].numpy(), whole[[0, 1], at], "float32")


def check_new_text(layer: Recurrence, theta: NestedMap, x: np.ndarray) -> None:
    """Checks that the first tokens of x [B,L,M] read nothing of the texts before them."""
    rng = np.random.default_rng(4)
    shapes = state_shapes(layer, *x.shape[:2])
    left = NestedMap({n: tf.constant(rng.normal(size=s), tf.float32) for n, s in shapes.items()})
    weights, start = decoding_weights(layer, theta), np.zeros(len(x))
    y, _ = extend(layer, weights, tf.constant(x[:, :1]), view(start), None, left)
    whole = layer.fprop(theta, tf.constant(x), layer.mask(None)).numpy()
    assert_close(y.numpy(), whole[:, :1], "float32")
