# tests: wings/hlo/kernels.py, wings/hlo/costs.py, wings/hlo/reader.py
"""Counts kernels of other libraries in compiled programs, as compilers write their calls."""

import json

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.hlo import read_operations
from lingvo_gshard.wings.hlo.operations import FusedAttention
from tests.hlo.parsing import parse_module

OPAQUE = """
ENTRY e {
  x = bf16[64,64] parameter(0)
  y = bf16[64,64] custom-call(x), custom_call_target="my_products",
    metadata={op_name="jit(step)/layer/ffi_call"}
  sorted = bf16[64,64] custom-call(y), custom_call_target="TopK",
    metadata={op_name="jit(step)/layer/top_k"}
  ROOT z = bf16[64,64] dot(sorted, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
PRODUCT = 2 * 64**3


def read(text, **kernel_flops):
    return read_operations(parse_module(text), Mesh.parse("data=1"), kernel_flops=kernel_flops)


def test_kernels_that_are_not_counted_are_named():
    found = read(OPAQUE)
    assert sum(operation.matmul_flops for operation in found.operations) == PRODUCT
    (note,) = found.notes
    assert note.startswith("kernel my_products (1 call a step): its products are not counted")
    assert "`kernel_flops=my_products=...`" in note


def test_a_user_says_what_a_kernel_computes():
    found = read(OPAQUE, my_products=1e9)
    assert sum(operation.matmul_flops for operation in found.operations) == PRODUCT + 10**9
    assert "counts 1e+09 FLOPs a call, as `kernel_flops` says" in found.notes[0]
    with pytest.raises(UserError, match="`kernel_flops=other` matches no kernel .* my_products"):
        read(OPAQUE, other=1.0)


B, N, L, D = 2, 4, 256, 64
ATTENTION = """
ENTRY e {{
  q = bf16[{B},{L},{N},{D}] parameter(0)
  k = bf16[{B},{L},{N},{D}] parameter(1)
  v = bf16[{B},{L},{N},{D}] parameter(2)
  ROOT call = (bf16[{B},{N},{L},{D}], u8[0]) custom-call(q, k, v),
    custom_call_target="{target}", backend_config={config}
}}
"""


@pytest.mark.parametrize(
    ("target", "mask", "window", "products", "pairs"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, 2, L * L),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, 2, L * (L + 1) // 2),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 8, 2, 36 + (L - 8) * 8),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 0, 5, L * (L + 1) // 2),
        ("__cudnn$fmhaSoftmaxBackward", "PADDING", 0, 5, L * L),
    ],
)
def test_attention_of_cudnn_counts_the_keys_that_queries_see(target, mask, window, products, pairs):
    stated = {
        "mask_type": mask,
        "sliding_window_length": window,
        "intermediate_tensor_shape": {"dimensions": [str(size) for size in (B, N, L, L)]},
    }
    config = json.dumps(json.dumps({"cudnn_fmha_backend_config": stated}))
    text = ATTENTION.format(B=B, N=N, L=L, D=D, target=target, config=config)
    found = read(text)
    (call,) = found.operations
    assert call.matmul_flops == products * 2 * B * N * pairs * D
    assert call.attention == FusedAttention(L, "Backward" in target, is_cudnn=True, head_dim=D)
    assert call.dtype == "bfloat16" and bool(found.notes) == (mask == "PADDING")


@pytest.mark.parametrize(
    ("target", "result", "left", "right"),
    [
        ("__cudnn$convForward", "f32[8,16,16,32]", "f32[8,16,16,64]", "f32[32,3,3,64]"),
        ("__cudnn$convBackwardInput", "f32[8,16,16,64]", "f32[8,16,16,32]", "f32[32,3,3,64]"),
        ("__cudnn$convBackwardFilter", "f32[32,3,3,64]", "f32[8,16,16,64]", "f32[8,16,16,32]"),
    ],
)
def test_convolutions_of_cudnn_count_as_those_of_xla(target, result, left, right):
    shape = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f"
    text = f"""
    ENTRY e {{
      x = {left} parameter(0)
      y = {right} parameter(1)
      ROOT call = ({result}, u8[1024]) custom-call(x, y), {shape}, custom_call_target="{target}"
    }}
    """
    (call,) = read(text.strip()).operations
    # All nine taps meet data, but for two of three along each edge.
    taps = 16 * 3 - 2
    assert call.matmul_flops == 2 * 8 * taps**2 * 32 * 64 and call.dtype == "float32"
