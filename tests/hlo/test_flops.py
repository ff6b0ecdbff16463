# tests: wings/hlo/costs.py
"""Compares FLOPs of matmuls and convolutions with closed forms and with sums computed by jax."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingvo_gshard.wings.hlo import costs as hlo_flops
from lingvo_gshard.wings.hlo.module import Module
from tests.hlo.parsing import parse_module


def instructions(function, *arguments):
    program = jax.jit(function).lower(*arguments).compiler_ir(dialect="hlo")
    module = Module.from_bytes(program.as_serialized_hlo_module_proto())
    return [i for c in module.computations for i in c.instructions]


def flops(function, *arguments):
    return sum(hlo_flops.matmul_flops(i) for i in instructions(function, *arguments))


@pytest.mark.parametrize(
    ("equation", "sizes", "products"),
    [
        ("mk,kn->mn", ((4, 5), (5, 6)), 4 * 5 * 6),
        ("emk,ekn->emn", ((8, 4, 5), (8, 5, 6)), 8 * 4 * 5 * 6),
        ("gsec,gsm->egcm", ((2, 3, 4, 5), (2, 3, 7)), 2 * 3 * 4 * 5 * 7),
        ("k,k->", ((9,), (9,)), 9),
    ],
)
def test_dot_flops(equation, sizes, products):
    arguments = [jnp.ones(size) for size in sizes]
    assert flops(lambda *x: jnp.einsum(equation, *x), *arguments) == 2 * products


@st.composite
def convolutions(draw):
    """Draws two-dimensional convolutions, including negative padding and dilations."""
    number = st.integers(1, 4)
    window = {"window_strides": [], "padding": [], "lhs_dilation": [], "rhs_dilation": []}
    base, kernel = [], []
    for _ in range(2):
        base.append(draw(st.integers(1, 6)))
        kernel.append(draw(number))
        for name in ("window_strides", "lhs_dilation", "rhs_dilation"):
            window[name].append(draw(number))
        low = draw(st.integers(-1, 4))
        reach = (kernel[-1] - 1) * window["rhs_dilation"][-1]
        window["padding"].append((low, draw(st.integers(0, 3)) + reach + 1))
    groups = draw(st.sampled_from(["none", "features", "batches"]))
    return base, kernel, window, groups


@pytest.mark.slow
@hypothesis.settings(max_examples=25)
@hypothesis.given(convolutions())
def test_convolution_flops_exclude_padding(drawn):
    """A convolution of ones with ones sums to its number of multiply-adds."""
    base, kernel, window, groups = drawn
    left = np.ones([4, 6, *base], np.float32)
    right = np.ones([6, 3 if groups == "features" else 6, *kernel], np.float32)
    counts = {"features": {"feature_group_count": 2}, "batches": {"batch_group_count": 2}}

    def convolve(left, right):
        return jax.lax.conv_general_dilated(left, right, **window, **counts.get(groups, {}))

    expected = 2 * int(convolve(left, right).sum())
    assert flops(convolve, left, right) == expected


def test_a_batched_product_written_as_a_tpu_convolution_counts_as_the_product():
    """The batch of 8 experts becomes a window over a dilated base."""
    line = (
        "ENTRY %m (a: bf16[8,128,32], b: bf16[8,128,32]) -> bf16[8,128,128] {\n"
        "  %a = bf16[8,128,32]{1,2,0} parameter(0)\n  %b = bf16[8,128,32]{1,2,0} parameter(1)\n"
        "  ROOT %c = bf16[8,128,128]{1,2,0} convolution(%a, %b), window={size=8 stride=7 "
        "lhs_dilate=8}, dim_labels=0bf_0oi->0bf\n}\n"
    )
    root = parse_module(line).entry.root
    assert hlo_flops.matmul_flops(root) == 2 * 8 * 128 * 128 * 32
    other = line.replace("stride=7 lhs_dilate=8", "stride=8 pad=7_7 lhs_dilate=7 rhs_reversal=1")
    assert hlo_flops.matmul_flops(parse_module(other).entry.root) == 2 * 8 * 128 * 128 * 32


def test_matmul_library_call_flops():
    text = (
        "ENTRY %m (a: f32[3,4,5], b: f32[3,6,5]) -> f32[3,4,6] {\n"
        "  %a = f32[3,4,5]{2,1,0} parameter(0)\n  %b = f32[3,6,5]{2,1,0} parameter(1)\n"
        '  ROOT %c = f32[3,4,6]{2,1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul"\n'
        "}\n"
    )
    assert hlo_flops.matmul_flops(parse_module(text).entry.root) == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize(
    ("dtype", "precision", "passes"),
    [
        ("float32", "default", 1),
        ("float32", "high", 3),
        ("float32", "highest", 6),
        ("bfloat16", "highest", 1),
        ("float32", "BF16_BF16_F32_X3", 3),
    ],
)
def test_matmul_passes_depend_on_precision(dtype, precision, passes):
    x = jnp.ones((4, 4), dtype)
    found = instructions(lambda x: jnp.dot(x, x, precision=precision), x)
    (dot,) = (i for i in found if i.opcode == "dot")
    assert hlo_flops.passes(dot) == passes


def test_elementwise_and_reduction_flops():
    x = jnp.ones((4, 8))
    found = instructions(lambda x: jnp.sum(jnp.tanh(x) * x, axis=1), x)
    by_opcode = {i.opcode: i for i in found if i.opcode in ("tanh", "multiply", "reduce")}
    assert {k: hlo_flops.other_flops(i, i.shape.size) for k, i in by_opcode.items()} == {
        "tanh": 32,
        "multiply": 32,
        "reduce": 32,
    }
    assert hlo_flops.other_flops(by_opcode["tanh"], 5) == 5
