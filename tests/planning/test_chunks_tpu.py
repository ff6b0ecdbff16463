"""Checks that a TPU's schedule overlaps the exchange of chunks with the experts' computation."""

import pytest
import tensorflow as tf

from lingvo_gshard import hlo
from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.planning.machines import topologies
from lingvo_gshard.runtime.partition import partition
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.sharding.mesh import Mesh

pytest.importorskip("libtpu")

MESH = "data=4"
B, L, M, H, E = 8, 512, 512, 2048, 8
# LIBTPU_INIT_ARGS=--xla_tpu_enable_async_all_to_all=true sets this for a process.
ASYNCHRONOUS = {"xla_tpu_enable_async_all_to_all": "true"}


def compiled(chunks: int, topology: str) -> hlo.Module:
    """Returns the scheduled bfloat16 program of a layer's output and gradients."""
    params = MixtureOfExperts.params().set(model_dim=M, hidden_dim=H, num_experts=E, group_size=L)
    params.exchange.set(chunks=chunks)
    layer = params.instantiate(path="moe")
    specs = layer.variable_specs()

    def run(theta, x_BLM, d_y):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        with context.scope(training=False), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            y = annotate(layer.fprop(theta, x_BLM, tf.ones([B, L], tf.int32)), "BLM")
        d_theta, d_x = tape.gradient(y, (theta, x_BLM), annotate(d_y, "BLM"))
        return y, annotate_weights(d_theta, specs), annotate(d_x, "BLM")

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x = tf.TensorSpec((B, L, M), tf.bfloat16)
    program = partition(run, MESH, "expert").lower(theta, x, x)
    devices = topologies.get(topology).compile_devices()
    return hlo.read_module(program.lower(devices).compile(compiler_options=ASYNCHRONOUS))


def overlaps(module: hlo.Module) -> set[tuple[str, str]]:
    """Returns (phase of an all-to-all, phase of an expert matmul that overlaps with it) pairs."""
    assert module.is_scheduled
    layers = frozenset({"moe", "moe/router", "moe/experts"})
    operations = hlo.read_operations(module, Mesh.parse(MESH), layers).operations
    by_name = {operation.name: operation for operation in operations}
    under_way: set[str] = set()
    found = set()
    for instruction in module.entry.instructions:
        operation = by_name.get(instruction.name)
        if instruction.opcode == "async-start" and instruction.base_opcode == "all-to-all":
            under_way.add(instruction.name)
        elif instruction.opcode == "async-done":
            under_way -= {operand.name for operand in instruction.operands}
        elif operation and operation.matmul_flops and operation.layer == "moe/experts":
            found |= {(by_name[start].phase, operation.phase) for start in under_way}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:2x2", "v5p:2x2x1"])
def test_experts_compute_while_other_chunks_are_exchanged(topology):
    found = overlaps(compiled(2, topology))
    assert {("forward", "forward"), ("backward", "backward")} <= found


@pytest.mark.slow
def test_without_chunks_the_exchange_waits_for_all_experts():
    """This holds in the forward pass. In the backward pass, weight gradients always overlap."""
    assert ("forward", "forward") not in overlaps(compiled(1, "v6e:2x2"))
