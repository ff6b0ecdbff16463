"""The collectives of single layers in compiled HLO, by kind and count, forward and backward.

Gradients are those of the layer's weights and input, given that of its output; no loss and no
optimizer adds any of its own.
"""

import collections

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import MultiHeadAttention
from lingvo_gshard.layers.embedding import Softmax, TokenEmbedding
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.runtime import hlo
from lingvo_gshard.runtime.partition import partition
from lingvo_gshard.runtime.program import PARTITIONERS
from lingvo_gshard.sharding import annotate, annotate_like

B, L, M, H, E, N, V = 8, 16, 32, 64, 8, 8, 128


def moe(dispatch: str = "gather") -> Layer:
    params = MixtureOfExperts.params().set(
        model_dim=M, hidden_dim=H, num_experts=E, group_size=L, dispatch=dispatch
    )
    return params.instantiate(path="moe")


def feed_forward() -> Layer:
    return FeedForward.params().set(model_dim=M, hidden_dim=H).instantiate(path="feed_forward")


def attention() -> Layer:
    params = MultiHeadAttention.params().set(model_dim=M, num_heads=N)
    return params.instantiate(path="attention")


def _call(layer: Layer, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
    if isinstance(layer, MultiHeadAttention):
        return layer.fprop(theta, x_BLM, x_BLM, tf.zeros([1, 1, L, L]))
    return layer.fprop(theta, x_BLM, tf.ones([B, L]))


def compiled(layer: Layer, mesh: str, strategy: str, backward: bool, partitioner: str = "gspmd"):
    """The executable of a layer's output and, with `backward`, of all gradients."""
    specs = layer.variable_specs()

    def marked(tree: NestedMap) -> NestedMap:
        return tree.pack(
            annotate_like(w, spec) for w, spec in zip(tree.flatten(), specs.flatten(), strict=True)
        )

    def run(theta, x_BLM, d_y_BLM):
        theta, x_BLM = marked(theta), annotate(x_BLM, "BLM")
        with context.scope(training=False), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            y_BLM = annotate(_call(layer, theta, x_BLM), "BLM")
        if not backward:
            return y_BLM
        d_theta, d_x = tape.gradient(y_BLM, (theta, x_BLM), annotate(d_y_BLM, "BLM"))
        return y_BLM, marked(d_theta), annotate(d_x, "BLM")

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x = tf.TensorSpec((B, L, M), tf.float32)
    return partition(run, mesh, strategy, partitioner=partitioner).compile(theta, x, x)


def counts(*arguments, **options) -> dict[str, int]:
    return hlo.count_by_kind(compiled(*arguments, **options).collectives())
