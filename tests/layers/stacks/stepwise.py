"""Runs a stack token by token, as decoding does."""

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import Memory
from lingvo_gshard.wings.inference.layers import decoding_weights, transformer
from lingvo_gshard.wings.inference.layers.cached import CacheView


def run_stepwise(
    stack: TransformerStack,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    memory: Memory | None,
    jit: bool = False,
) -> tf.Tensor:
    """Returns the stack's output [B,L,M] for rows of one segment, computed one token at a time."""
    rows, length, _ = x_BLM.shape
    slots = length + 1
    weights = decoding_weights(stack, theta)
    cached = None if memory is None else transformer.cache_memory(stack, weights, memory)
    mask = tf.ones([rows, 1], tf.int32)
    caches, outputs = [], []
    states = transformer.stack_state_shapes(stack, rows, slots)
    pairs = zip(transformer.stack_cache_shapes(stack, rows, slots), states, strict=True)
    for shapes, more in pairs:
        empty = {n: tf.split(tf.zeros(s), [2, slots - 2], 2) for n, s in shapes.items()}
        caches.append(NestedMap({**empty, **{n: tf.zeros(s) for n, s in more.items()}}))

    @tf.function(jit_compile=jit, autograph=False)
    def step(x_B1M, position, caches):
        distances = tf.range(slots)[None, :] - position
        view = CacheView(tf.fill([rows, 1], position), (distances <= 0)[None], distances, position)
        y_B1M, caches, _ = transformer.extend_stack(
            stack, weights, x_B1M, mask, view, caches, cached
        )
        return y_B1M, caches

    for position in range(length):
        y_B1M, caches = step(x_BLM[:, position : position + 1], tf.constant(position), caches)
        outputs.append(y_B1M)
    return tf.concat(outputs, 1)
