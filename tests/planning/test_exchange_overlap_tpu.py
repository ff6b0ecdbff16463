# tests: layers/moe/exchange.py, layers/stacks/batch_parts.py, wings/hlo/asynchronous.py
"""Checks that a TPU's schedule overlaps the exchange of some tokens with computation for others."""

import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.planning.machines import topologies
from tests.layers.stacks.executions import sequential

pytest.importorskip("libtpu")

MESH = "data=4"
B, L, M, H, E = 8, 512, 512, 2048, 8
# LIBTPU_INIT_ARGS=--xla_tpu_enable_async_all_to_all=true sets this for a process.
ASYNCHRONOUS = {"xla_tpu_enable_async_all_to_all": "true"}


def mixture(chunks: int) -> MixtureOfExperts:
    params = MixtureOfExperts.params().set(model_dim=M, hidden_dim=H, num_experts=E, group_size=L)
    params.exchange.set(chunks=chunks)
    return params.instantiate(path="moe")


def stack(interleaved: int) -> TransformerStack:
    experts = MixtureOfExperts.params().set(num_experts=E, group_size=L)
    params = TransformerStack.params().set(
        num_layers=1, model_dim=M, hidden_dim=H, num_heads=4, moe_every=1, moe=experts
    )
    params.execution = sequential(interleaved=interleaved)
    return params.instantiate(path="stack")


def compiled(layer: Layer, topology: str, rows: int = B) -> hlo.Module:
    """Returns the scheduled bfloat16 program of a layer's output and gradients in training."""
    specs = layer.variable_specs()

    def run(theta, x_BLM, d_y):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        with context.scope(training=True, seed=tf.constant([1, 2])), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            y = annotate(layer.fprop(theta, x_BLM, tf.ones([rows, L], tf.int32)), "BLM")
        d_theta, d_x = tape.gradient(y, (theta, x_BLM), annotate(d_y, "BLM"))
        return y, annotate_weights(d_theta, specs), annotate(d_x, "BLM")

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x = tf.TensorSpec((rows, L, M), tf.bfloat16)
    program = partition(run, MESH, "expert").lower(theta, x, x)
    devices = topologies.get(topology).compile_devices()
    return hlo.read_module(program.lower(devices).compile(compiler_options=ASYNCHRONOUS))


def overlaps(module: hlo.Module, *layers: str) -> set[tuple[str, str, str]]:
    """Returns (phase of an all-to-all, layer and phase of a product that overlaps with it).

    Args:
      module: the scheduled program.
      *layers: name scopes of the layers to tell apart.
    """
    assert module.is_scheduled
    operations = hlo.read_operations(module, Mesh.parse(MESH), frozenset(layers)).operations
    by_name = {operation.name: operation for operation in operations}
    under_way: set[str] = set()
    found = set()
    for instruction in module.entry.instructions:
        operation = by_name.get(instruction.name)
        if instruction.opcode == "async-start" and instruction.base_opcode == "all-to-all":
            under_way.add(instruction.name)
        elif instruction.opcode == "async-done":
            under_way -= {operand.name for operand in instruction.operands}
        elif operation and operation.matmul_flops:
            found |= {
                (by_name[start].phase, operation.layer, operation.phase) for start in under_way
            }
    return found


MIXTURE = ("moe", "moe/router", "moe/experts")
FEED_FORWARD = "stack/layers_0/feed_forward"
STACK = ("stack/layers_0/self_attention", FEED_FORWARD, f"{FEED_FORWARD}/experts")


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])
def test_experts_compute_while_other_chunks_are_exchanged(topology):
    found = overlaps(compiled(mixture(chunks=2), topology), *MIXTURE)
    assert {(x, "moe/experts", x) for x in ("forward", "backward")} <= found


@pytest.mark.slow
def test_without_chunks_the_exchange_waits_for_all_experts():
    """This holds in the forward pass. In the backward pass, weight gradients always overlap."""
    found = overlaps(compiled(mixture(chunks=1), "v6e:2x2"), *MIXTURE)
    assert ("forward", "moe/experts", "forward") not in found


@pytest.mark.slow
def test_layers_compute_while_another_part_of_the_batch_is_exchanged():
    whole, parts = (overlaps(compiled(stack(n), "v5p:2x2x1", 128), *STACK) for n in (1, 2))
    beside = {(x, f"{FEED_FORWARD}/experts", x) for x in ("forward", "backward")}
    assert beside <= parts
    assert ("forward", f"{FEED_FORWARD}/experts", "forward") not in whole
