# tests: runtime/lowering/lowering.py, wings/spmd_passes/passes.py, wings/spmd_passes/inlining.py
"""Tests that calls of kernels keep their names in loops; plans find attention by them."""

import re

import tensorflow as tf
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from lingvo_gshard.sharding import Partitioning, annotate
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.kernels.call import AttentionCall
from tests.kernels import programs

SHAPE = (1, 2, 256, 64)


def test_loops_call_the_functions_of_kernels_under_their_scope():
    call = AttentionCall(is_causal=True, has_segments=True)

    def step(query, segments):
        def body(index, x):
            x = kernels.attention.attend(call, x, x, x, [segments, segments])
            return index + 1, annotate(x, "BNLD")

        _, found = tf.while_loop(lambda index, _: index < 3, body, (0, query), maximum_iterations=3)
        return [("output", found, None)]

    named = [("query", SHAPE, "BNLD", "float32"), ("segments", (1, 256), "BL", "int32")]
    partitioning = Partitioning.make("data=1", "replicated").on("cuda")
    made = programs.lowered(step, named, partitioning)
    with mlir.make_ir_context():
        context = ir.Context.current
        module = stablehlo.deserialize_portable_artifact(context, made.module)
        text = module.operation.get_asm(enable_debug_info=True)
    lines = dict(re.findall(r"^(#loc\d+) = (.*)$", text, re.MULTILINE))
    loop = text[text.index("stablehlo.while") :]
    (location,) = re.findall(r"call @kernel_attention_\w+\(.*loc\((#loc\d+)\)", loop)
    parts = re.findall(r"#loc\d+", lines[location])
    assert any("fused_attention_share_" in lines[part] for part in parts)
