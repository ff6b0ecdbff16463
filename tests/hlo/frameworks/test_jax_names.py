# tests: wings/hlo/names.py
"""Compares translated names with the scopes that a small jax program was written in."""

import re

import jax
import jax.numpy as jnp
import pytest

from lingvo_gshard.wings.hlo.names import layer_and_phase, operation_name

BACKWARD = "jit(step)/transpose(jvp(model))/block_0/jvp(model)/block_0/checkpoint"


@pytest.mark.parametrize(
    ("op_name", "layer", "phase"),
    [
        ("jit(step)/jvp(model)/block_0/dense/dot_general", "model/block_0/dense", "forward"),
        ("jit(step)/jvp(model)/block_0/dense/jit(relu)/max", "model/block_0/dense", "forward"),
        (f"{BACKWARD}/dense/dot_general", "model/block_0/dense", "backward"),
        (f"{BACKWARD}/rematted_computation/dense/tanh", "model/block_0/dense", "rematerialized"),
        ("jit(step)/vmap(jvp(model))/dense/dot_general", "model/dense", "forward"),
        ("jit(step)/transpose(jvp(a/b))/dot_general", "a/b", "backward"),
        ("jit(call)/call_exported_step/jit(step)/jvp(model)/add", "model", "forward"),
        ("jit(step)/optimizer/mul", "", "optimizer"),
        ("jit(step)/jvp()/reduce_sum", "", "other"),
        ("jit(step)/mul", "", "other"),
        (r"state[\'params\'][\'mlp/~/linear\'][\'w\']", "", "other"),
        ("jit(step)/jvp(m)/while/body/closed_call/dense/tanh", "m/dense", "forward"),
        # XLA merged two products, and an operation with its recomputation.
        ("jit(f)/(transpose(jvp(m))/a/dot_general:transpose(jvp(m))/b/dot)", "m/a", "backward"),
        (f"jit(f)/({BACKWARD[10:]}/rematted_computation/x/tanh:jvp(model)/block_0/x/tanh)",
         "model/block_0/x", "forward"),
    ],
)  # fmt: skip
def test_scopes_of_jax(op_name, layer, phase):
    assert layer_and_phase(operation_name(op_name)) == (layer, phase)


def test_products_of_a_program_have_the_scopes_they_were_written_in():
    """One layer is recomputed within a loop; of each the gradient has two products."""

    @jax.checkpoint
    def block(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w), None

    def loss(weights, x):
        with jax.named_scope("stack"):
            x, _ = jax.lax.scan(block, x, weights["stacked"])
        with jax.named_scope("head"):
            return jnp.sum(jnp.tanh(x @ weights["head"]) ** 2)

    def spec(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    specs = {"stacked": spec(3, 8, 8), "head": spec(8, 4)}, spec(16, 8)
    text = jax.jit(jax.grad(loss)).lower(*specs).compile().as_text()
    dots = re.findall(r'= \S+ dot\(.*op_name="([^"]*)"', text)
    found = [layer_and_phase(operation_name(name)) for name in dots]
    assert set(found) == {
        ("stack/block", "forward"),
        ("stack/block", "rematerialized"),
        ("stack/block", "backward"),
        ("head", "forward"),
        ("head", "backward"),
    }
