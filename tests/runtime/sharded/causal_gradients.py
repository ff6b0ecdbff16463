"""Compiles the gradients of a causal stack of Transformer layers on one long row."""

import functools

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.kernel import AttentionKernel
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.wings.functions.partition import partition


@functools.cache
def compiled(
    devices: int,
    strategy: str = "context",
    axis: str = "context",
    kernel: type[AttentionKernel] = DenseKernel,
    block_size: int = 0,
    num_layers: int = 1,
    model_dim: int = 32,
    length: int = 1024,
) -> Executable:
    """Compiles the gradients of a causal stack with 4 heads on one row.

    Args:
      devices: number of devices along the axis.
      strategy: what is split over them.
      axis: the only axis of the mesh.
      kernel: of the attention.
      block_size: that of the kernel; 0 for its default.
      num_layers: number of layers.
      model_dim: M, a fourth of H.
      length: positions of the row.
    """
    p = TransformerStack.params().set(
        num_layers=num_layers,
        model_dim=model_dim,
        num_heads=4,
        hidden_dim=4 * model_dim,
        moe_every=0,
        is_causal=True,
    )
    p.layer.self_attention.kernel = kernel.params()
    if block_size:
        p.layer.self_attention.kernel.block_size = block_size
    stack = p.instantiate(path="stack")
    specs = stack.variable_specs()

    def gradients(theta, x_BLM, segments_BL):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        segments_BL = annotate(segments_BL, "BL")
        with context.scope(training=False), tf.GradientTape() as tape:
            tape.watch(theta.flatten())
            total = tf.reduce_sum(tf.square(stack.fprop(theta, x_BLM, segments_BL)))
        found = theta.pack(tape.gradient(total, theta.flatten()))
        return annotate_weights(found, specs)

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x, segments = tf.TensorSpec([1, length, model_dim]), tf.TensorSpec([1, length], tf.int32)
    return partition(gradients, f"{axis}={devices}", strategy).compile(theta, x, segments)


def temporaries(devices: int, *arguments, **values) -> int:
    """Returns the bytes of temporaries on each device; the arguments are those of `compiled`."""
    return compiled(devices, *arguments, **values).memory()["temporaries"]
