# tests: layers/moe/shared_expert.py, layers/moe/layer.py, wings/dropless/exchanges.py
"""Tests that neither the shared expert nor the exchange of rows waits for the other."""

import functools

import jax
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.dispatches import GatherDispatch
from lingvo_gshard.layers.moe.routers import TopKRouter
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.hlo.collectives import is_collective
from lingvo_gshard.wings.hlo.costs import is_matmul
from lingvo_gshard.wings.hlo.module import Instruction

B, L, M, H, E = 8, 16, 8, 16, 8
EXCHANGE = ("moe/dispatch", "moe/combine")


def program(dispatch, exchange: str) -> hlo.Module:
    """Returns the program of a layer's output and gradients on eight CPU devices."""
    params = MixtureOfExperts.params().set(
        model_dim=M,
        hidden_dim=H,
        num_experts=E,
        group_size=L,
        shared_hidden_dim=H,
        router=TopKRouter.params(),
        dispatch=dispatch.params().set(exchange=exchange),
    )
    layer = params.instantiate(path="moe")
    specs = layer.variable_specs()

    def run(theta, x_BLM, d_y):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        with context.scope(training=True, seed=tf.constant([1, 2])), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            y = annotate(layer.fprop(theta, x_BLM, tf.ones([B, L], tf.int32)), "BLM")
        return y, *tf.nest.flatten(tape.gradient(y, (theta, x_BLM), annotate(d_y, "BLM")))

    theta = specs.transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    x = tf.TensorSpec((B, L, M))
    lowered = partition(run, "data=8", "expert").lower(theta, x, x)
    return hlo.read_module(lowered.lower(jax.devices()[:8]).compile())


def parts(instruction: Instruction) -> list[Instruction]:
    called = instruction.called if instruction.opcode in ("fusion", "call") else []
    return [instruction, *(part for each in called for part in each.instructions)]


@functools.cache
def sources(instruction: Instruction) -> frozenset[Instruction]:
    """Returns all instructions that an instruction waits for."""
    found = frozenset(instruction.operands)
    return found.union(*(sources(operand) for operand in instruction.operands))


@pytest.mark.parametrize(
    ("dispatch", "exchange"),
    [
        (DroplessDispatch, "gathered"),
        (DroplessDispatch, "fixed"),
        (GatherDispatch, "fixed"),
        (GatherDispatch, "gathered"),
    ],
)
def test_neither_waits_for_the_other_in_either_pass(dispatch, exchange):
    instructions = program(dispatch, exchange).entry.instructions
    shared = [
        i
        for i in instructions
        if any(is_matmul(part) and "moe/shared" in part.op_name for part in parts(i))
    ]
    exchanges = [
        i
        for i in instructions
        if is_collective(i) and any(scope in i.op_name for scope in EXCHANGE)
    ]
    # Two products, and two gradients of each; there and back, in both passes.
    assert len(shared) >= 6 and len(exchanges) >= 4
    for product in shared:
        assert not sources(product) & set(exchanges), product.op_name
    for one in exchanges:
        assert not sources(one) & set(shared), one.op_name
