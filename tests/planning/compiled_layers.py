"""Compiles layers, alone or in loops, for virtual CPU devices or ahead of time for a TPU."""

import functools

import jax
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.layer import Layer, scope_name
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.hlo import OperationList, read_module, read_operations
from lingvo_gshard.wings.planning.machines import topologies
from tests.layers.moe.dispatch_names import dispatch_params

B, L, M, H, E, N, S = 8, 32, 64, 128, 8, 8, 32


@functools.cache
def layer_of(kind: str) -> Layer:
    """Returns a layer: feed_forward, attention, or a dispatch of a mixture of experts."""
    if kind == "feed_forward":
        return FeedForward.params().set(model_dim=M, hidden_dim=H).instantiate(path=kind)
    if kind == "attention":
        return SelfAttention.params().set(model_dim=M, num_heads=N).instantiate(path=kind)
    params = MixtureOfExperts.params().set(
        model_dim=M, hidden_dim=H, num_experts=E, group_size=S, dispatch=dispatch_params(kind)
    )
    return params.instantiate(path="moe")


def _call(layer: Layer, theta, x_BLM):
    if isinstance(layer, SelfAttention):
        return layer.fprop(theta, x_BLM, layer.mask(None))
    return layer.fprop(theta, x_BLM, tf.ones([B, L], tf.int32))


def _repeated(function, x, loops: tuple[int, ...]):
    """Applies a function in nested loops of these lengths, the outermost first."""
    if not loops:
        return function(x)
    _, result = tf.while_loop(
        lambda i, _: i < loops[0],
        lambda i, x: (i + 1, annotate(_repeated(function, x, loops[1:]), "BLM")),
        (tf.constant(0), x),
        maximum_iterations=loops[0],
    )
    return result


@functools.cache
def compiled(
    kind: str,
    mesh: str,
    strategy: str,
    loops: tuple[int, ...] = (),
    gradients: bool = False,
    topology: str = "cpu:8",
    partitioner: str = "gspmd",
) -> jax.stages.Compiled:
    """Compiles a program that computes a layer's output and optionally its gradients."""
    layer = layer_of(kind)
    specs = layer.variable_specs()

    def run(theta, x_BLM, d_y):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        with context.scope(training=False), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            y = _repeated(lambda x: _call(layer, theta, x), x_BLM, loops)
            y = annotate(y, "BLM")
        if not gradients:
            return y
        d_theta, d_x = tape.gradient(
            y, (theta, x_BLM), annotate(d_y, "BLM"), unconnected_gradients="zero"
        )
        d_theta = annotate_weights(d_theta.transform(tf.convert_to_tensor), specs)
        return y, d_theta, annotate(d_x, "BLM")

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x = tf.TensorSpec((B, L, M))
    program = partition(run, mesh, strategy, partitioner=partitioner).lower(theta, x, x)
    return program.lower(topologies.get(topology).compile_devices()).compile()


def operations(kind: str, mesh: str, *arguments, **options) -> OperationList:
    """Returns the operations that one device executes."""
    program = compiled(kind, mesh, *arguments, **options)
    scopes = [scope_name(path) for path in layer_of(kind).layer_paths()]
    return read_operations(read_module(program), Mesh.parse(mesh), scopes)
