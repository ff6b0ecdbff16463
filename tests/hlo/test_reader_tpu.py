# tests: wings/hlo/reader.py
"""Compares layers compiled ahead of time for TPUs with the same closed forms."""

import pytest

from tests.hlo.test_reader import (
    ATTENTION,
    DEVICES,
    DISPATCH,
    EXPERTS,
    FEED_FORWARD,
    FLOAT,
    ROUTER,
    C,
    E,
    S,
    calls,
    flops,
)
from tests.planning.compiled_layers import B, L, M, operations

pytest.importorskip("libtpu")


def test_experts_in_a_loop():
    """Dispatch multiplies by one-hot tensors, which need no gradient."""
    found = operations("einsum", "data=8", "expert", (5,), gradients=True, topology="v3:2x2")
    assert found.notes == []
    forward = 2 * (EXPERTS + ROUTER + 2 * DISPATCH) * 5 // DEVICES
    assert flops(found, phase="forward") == forward
    assert flops(found, phase="backward") == 2 * forward - 2 * DISPATCH * 5 // DEVICES
    moving = 2 * DISPATCH * 5 // DEVICES
    assert flops(found, dispatch=True, phase="forward") == 2 * moving
    assert flops(found, dispatch=True, phase="backward") == 3 * moving
    # The compiler sends operands of products as bfloat16.
    part = 2 * (B * L // S) * E * C * M // DEVICES
    assert calls(found) == {
        ("all-to-all", ("data",), 8, "bfloat16", part, "forward"): 10,
        ("all-to-all", ("data",), 8, "bfloat16", part, "backward"): 10,
        ("all-reduce", ("data",), 8, "float32", FLOAT * M * E, "backward"): 1,
    }
    assert {o.dtype for o in found.operations if o.matmul_flops} <= {"bfloat16", "float32"}


def test_attention_in_nested_loops():
    found = operations("attention", "model=8", "tensor", (3, 2), gradients=True, topology="v3:2x2")
    assert found.notes == []
    assert flops(found, layer="attention", phase="forward") == 2 * ATTENTION * 6 // DEVICES
    assert flops(found, layer="attention", phase="backward") == 4 * ATTENTION * 6 // DEVICES
    whole = FLOAT * B * L * M
    assert calls(found) == {
        ("all-reduce", ("model",), 8, "float32", whole, "forward"): 6,
        ("all-reduce", ("model",), 8, "float32", whole, "backward"): 6,
    }


def test_arrays_in_vector_memory_cause_no_traffic():
    """On a v5e, vector memory holds all arrays of this small layer except inputs and outputs."""
    found = operations("feed_forward", "data=8", "fsdp", gradients=True, topology="v5e:2x4")
    assert flops(found) == 3 * 2 * FEED_FORWARD // DEVICES
    gathered = [o.collective for o in found.operations if o.collective]
    gathered = [c for c in gathered if c.kind == "all-gather"]
    assert {c.axes for c in gathered} == {("data",)}
    products = [o for o in found.operations if o.matmul_flops]
    on_cpu = operations("feed_forward", "data=8", "fsdp", gradients=True)
    assert sum(o.bytes for o in products) < sum(
        o.bytes for o in on_cpu.operations if o.matmul_flops
    )
