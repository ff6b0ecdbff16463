"""Compares packed segments with dense attention; a loop in NumPy stands for cuDNN."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from lingvo_gshard.core.lazy import cudnn_attention, ir
from lingvo_gshard.wings.kernels import attention_cudnn
from lingvo_gshard.wings.kernels.call import AttentionCall

B, L, N, K, D, MOST = 3, 12, 4, 2, 8, 4
# Rows with padding, without, and of one token; the second has as many segments as there may be.
SEGMENTS = np.array(
    [[1] * 5 + [2] * 4 + [0] * 3, [1] * 2 + [2] * 1 + [3] * 6 + [4] * 3, [1] + [0] * 11], np.int32
)


class Cudnn:
    """Computes XLA's custom calls of cuDNN: segments by lengths, and by offsets in elements.

    What it does not write is NaN.
    """

    def __init__(self):
        self.calls = []

    def ffi_call(self, target, results, output_layouts, custom_call_api_version, **options):
        assert custom_call_api_version == 2
        config = json.loads(options["legacy_backend_config"])["cudnn_fmha_backend_config"]
        assert config["fmha_scale"] == 1.0 and config["dropout_rate"] == 0.0
        assert config["max_seg_per_batch"] == MOST
        # A segment is contiguous in [B,L,N,D].
        assert all(x == (0, 2, 1, 3) for x in output_layouts[:-1] if x is not None)
        is_gradient = target == "__cudnn$fmhaSoftmaxBackward"
        assert is_gradient or target == "__cudnn$fmhaSoftmax"
        self.calls.append((target, results[-1].shape[0]))
        compute = self._backward if is_gradient else self._forward
        return lambda *arrays: [
            *compute(config, *map(np.asarray, arrays)),
            np.zeros(results[-1].shape, np.uint8),
        ]

    def _forward(self, config, query, keys, values, *segments):
        output = self._empty(query)
        batch, length, heads, _ = query.shape
        sums = np.full((batch * MOST, heads, length), np.nan, np.float32)
        for s, (of_query, of_keys) in enumerate(self._segments(batch, segments)):
            found, log_sums = self._attend(config, of_query(query), of_keys(keys), of_keys(values))
            of_query(output)[:] = found
            sums[s, :, : len(found)] = log_sums
        return jnp.asarray(output).transpose(0, 2, 1, 3), jnp.asarray(sums)

    def _backward(self, config, query, keys, values, sums, d_output, output, *segments):
        gradients = [self._empty(x) for x in (query, keys, values)]
        for s, (of_query, of_keys) in enumerate(self._segments(len(query), segments)):
            arrays = of_query(query), of_keys(keys), of_keys(values)
            attend = functools.partial(self._attend, config)
            (found, log_sums), pull = jax.vjp(attend, *arrays)
            np.testing.assert_allclose(of_query(output), found, rtol=1e-5)
            np.testing.assert_allclose(sums[s, :, : len(found)], log_sums, rtol=1e-5)
            parts = zip((of_query, of_keys, of_keys), gradients, strict=True)
            pulled = pull((of_query(d_output), jnp.zeros_like(log_sums)))
            for (of, into), gradient in zip(parts, pulled, strict=True):
                of(into)[:] = gradient
        return tuple(jnp.asarray(x).transpose(0, 2, 1, 3) for x in gradients)

    def _empty(self, x):
        return np.full(x.shape, np.nan, np.float32)

    def _segments(self, batch, arrays):
        """Yields for each segment the functions that return its tokens in arrays of all rows."""
        *lengths, of_queries, of_keys = arrays
        assert of_queries.shape == of_keys.shape == (batch, MOST + 1)
        of_queries, of_keys = of_queries.reshape(-1), of_keys.reshape(-1)
        for s, (length, key_length) in enumerate(
            zip(*(x.reshape(-1) for x in lengths), strict=True)
        ):
            if length:
                assert length == key_length
                yield self._part(of_queries[s], length), self._part(of_keys[s], length)

    def _part(self, begin, length):
        def part(x):
            heads, dim = x.shape[2:]
            first, rest = divmod(begin, heads * dim)
            assert not rest
            return x.reshape(-1, heads, dim)[first : first + length]

        return part

    def _attend(self, config, query, keys, values):
        shared = query.shape[1] // keys.shape[1]
        logits = jnp.einsum("qnd,knd->nqk", query, jnp.repeat(keys, shared, 1))
        distances = jnp.arange(len(query))[:, None] - jnp.arange(len(keys))
        if config["mask_type"] == "PADDING_CAUSAL":
            logits = jnp.where(distances >= 0, logits, -jnp.inf)
        else:
            assert config["mask_type"] == "PADDING"
        if config["sliding_window_length"]:
            logits = jnp.where(distances < config["sliding_window_length"], logits, -jnp.inf)
        mixed = jnp.einsum("nqk,knd->qnd", jax.nn.softmax(logits), jnp.repeat(values, shared, 1))
        return mixed, jax.nn.logsumexp(logits, -1)


@pytest.fixture
def cudnn(monkeypatch):
    found = Cudnn()
    monkeypatch.setattr(jax.ffi, "ffi_call", found.ffi_call)
    return found


def dense(query, keys, values, is_causal, window=0):
    """Returns the attention [B,N,L,D] over a mask of all positions; 0 in padding."""
    keys, values = (jnp.repeat(x, N // K, 1) for x in (keys, values))
    visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, :, None] > 0)
    visible = visible & np.tri(L, dtype=bool) if is_causal else visible
    visible = visible & ~np.tri(L, k=-window - 1, dtype=bool) if window else visible
    logits = jnp.einsum("bnqd,bnkd->bnqk", query, keys)
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30))
    is_token = SEGMENTS[:, None, :, None] > 0
    return jnp.where(is_token, jnp.einsum("bnqk,bnkd->bnqd", weights, values), 0.0)


def arrays():
    generator = np.random.default_rng(5)
    shapes = (B, N, L, D), (B, K, L, D), (B, K, L, D)
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


# One row of one head of keys works in 2 (queries of a head) * 8 D L MOST bytes.
WORKSPACE = 16 * D * L * MOST


@pytest.mark.parametrize(
    ("is_causal", "window"), [(False, 0), (True, 0), (True, 1), (True, 3), (True, 20)]
)
@pytest.mark.parametrize(
    ("limit", "calls"),
    # All rows and heads together; the gradients of each head; each row and head.
    [(2**31, (1, 1)), (B * WORKSPACE, (1, 2)), (WORKSPACE, (3, 6))],
)
def test_segments_are_computed_as_with_a_mask(cudnn, monkeypatch, is_causal, window, limit, calls):
    monkeypatch.setattr(attention_cudnn, "_MOST_WORKSPACE", limit)
    call = AttentionCall(is_causal, window, has_segments=True, packed_segments=MOST)
    query, keys, values = arrays()
    assert attention_cudnn.can_pack(call, [query.shape, keys.shape, keys.shape], "H100")
    operands = (query, keys, values, jnp.asarray(SEGMENTS), jnp.asarray(SEGMENTS))
    mixed, sums = attention_cudnn.forward(call, *operands)
    assert len(cudnn.calls) == calls[0] and sums.shape == (B * MOST, N, L)
    expected, pull = jax.vjp(lambda *x: dense(*x, is_causal, window), query, keys, values)
    np.testing.assert_allclose(mixed, expected, atol=1e-6)
    # The gradient of the output of padding must not matter.
    d_mixed = jnp.cos(jnp.arange(expected.size, dtype=jnp.float32)).reshape(expected.shape)
    found = attention_cudnn.backward(call, *operands, mixed, sums, d_mixed)
    for gradient, reference in zip(found, pull(d_mixed), strict=True):
        np.testing.assert_allclose(gradient, reference, atol=1e-5)
    gradients = cudnn.calls[calls[0] :]
    assert len(gradients) == calls[1]
    assert sum(workspace for _, workspace in gradients) == B * K * WORKSPACE
    assert max(workspace for _, workspace in gradients) <= limit


def test_calls_are_those_of_jax(monkeypatch):
    """Compares the custom calls with those of jax's primitives, for as many heads of keys."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(
        fused_attention_stablehlo, "check_is_flash_attention", lambda *_, **__: None
    )
    call = AttentionCall(True, 3, has_segments=True, packed_segments=MOST)
    x = jax.ShapeDtypeStruct((B, N, L, D), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((B, L), jnp.int32)

    def ours(query, keys, values, segments, d_mixed):
        operands = (query, keys, values, segments, segments)
        found = attention_cudnn.forward(call, *operands)
        return attention_cudnn.backward(call, *operands, *found, d_mixed)

    def of_jax(query, keys, values, segments, d_mixed):
        integers = [jnp.ones((B, MOST + i), jnp.int32) for i in (0, 0, 1, 1)]
        names = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets")
        attend = functools.partial(
            fused_attention_stablehlo.dot_product_attention,
            **dict(zip(names, integers, strict=True)),
            mask_type=fused_attention_stablehlo.MaskType.PADDING_CAUSAL,
            sliding_window_length=4,
            seed=0,
        )
        rows = [x.transpose(0, 2, 1, 3) for x in (query, keys, values, d_mixed)]
        return jax.vjp(attend, *rows[:3])[1](rows[3])

    found, expected = (_custom_calls(f, x, x, x, segments, x) for f in (ours, of_jax))
    # Ours counts what a gradient works in.
    assert found[1].pop(-1) == f"tensor<{4 * B * MOST * N * L * D}xui8>"
    assert expected[1].pop(-1) == "tensor<0xui8>"
    assert found == expected and len(found) == 2


def _custom_calls(function, *arguments):
    """Returns the target, attributes, and types of operands and results of calls of cuDNN."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    found = []

    def visit(operation):
        attributes = operation.attributes
        if "call_target_name" in attributes and "cudnn" in str(attributes["call_target_name"]):
            names = "call_target_name backend_config operand_layouts result_layouts api_version"
            facts = [str(attributes[name]) for name in names.split()]
            types = [str(x.type) for x in (*operation.operands, *operation.results)]
            found.append([*facts, *types])
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(lambda each: visit(each.operation))
    return found


@pytest.mark.parametrize(
    "row",
    [
        [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5],
        [1, 1, 2, 2, 1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0],
        [2, 2, 2, 3, 3, 3, 3, 3, 3, 0, 0, 0],
    ],
)
def test_rows_with_other_segments_are_not_a_number(cudnn, row):
    segments = jnp.asarray(np.stack([SEGMENTS[0], row, SEGMENTS[2]]))
    call = AttentionCall(is_causal=True, has_segments=True, packed_segments=MOST)
    found = attention_cudnn._are_known(segments, MOST)
    assert found.tolist() == [True, False, True]
    packed = attention_cudnn._Packed(call, [*arrays(), segments, segments])
    output = packed.output(jnp.ones((B, N, L, D)))
    assert np.isnan(output[1]).all() and np.isfinite(output[0]).all()
    assert (output[2, :, :1] == 1).all() and (output[2, :, 1:] == 0).all()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA B200", True),
        ("NVIDIA GB200", True),
        ("NVIDIA H20", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA L40S", False),
        ("", False),
    ],
)
def test_gpus_know_segments_from_hopper_on(kind, expected):
    call = AttentionCall(is_causal=True, has_segments=True, packed_segments=MOST)
    assert attention_cudnn.can_pack(call, [(B, N, L, D)] * 3, kind) == expected


def test_windows_of_a_wrong_cudnn_are_left_to_our_kernel(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "check_cudnn_version", lambda: 91400)
    for window, expected in ((0, True), (3, False)):
        call = AttentionCall(True, window, has_segments=True, packed_segments=MOST)
        assert attention_cudnn.can_pack(call, [(B, N, L, D)] * 3, "H100") == expected


def test_segments_that_need_too_much_memory_are_left_to_our_kernel():
    call = AttentionCall(is_causal=True, has_segments=True, packed_segments=16)
    # Heads of 128, four of which share a head of keys: the smallest call works in 8 GiB.
    shapes = [(1, 32, 2**17, 128), *[(1, 8, 2**17, 128)] * 2]
    assert not attention_cudnn.can_pack(call, shapes, "H100")


def test_offsets_of_a_call_are_below_two_billion():
    call = AttentionCall(is_causal=True, has_segments=True, packed_segments=2)
    # Gradients need no division of rows, but two rows have 2^31 elements.
    shapes = [(4, 64, 2**17, 128)] * 3
    assert attention_cudnn.can_pack(call, shapes, "H100")
    assert attention_cudnn._calls(call, *shapes[:2]) == (4, 4)
    # One row has as many.
    assert not attention_cudnn.can_pack(call, [(4, 64, 2**18, 128)] * 3, "H100")
