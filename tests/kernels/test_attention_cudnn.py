"""Compares packed segments with dense attention; a loop in NumPy stands for cuDNN."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lingvo_gshard.core.lazy import cudnn_attention
from lingvo_gshard.wings.kernels import attention_cudnn
from lingvo_gshard.wings.kernels.call import AttentionCall

B, L, N, K, D, MOST = 3, 12, 4, 2, 8, 4
# Rows with padding, without, and of one token; the second has as many segments as there may be.
SEGMENTS = np.array(
    [[1] * 5 + [2] * 4 + [0] * 3, [1] * 2 + [2] * 1 + [3] * 6 + [4] * 3, [1] + [0] * 11], np.int32
)


class Cudnn:
    """Computes segments as cuDNN does: by lengths, and by offsets in elements of all rows.

    What it does not write is NaN.
    """

    MaskType = cudnn_attention.MaskType
    AttentionLayout = cudnn_attention.AttentionLayout

    def __init__(self):
        self._dot_product_attention_fwd_p = types.SimpleNamespace(bind=self.forward)
        self._dot_product_attention_bwd_p = types.SimpleNamespace(bind=self.backward)

    def forward(self, query, keys, values, *others, mask_type, layout, is_training, **arguments):
        assert layout == self.AttentionLayout.BTNH.value and is_training
        assert arguments["scale"] == 1.0 and not arguments["sliding_window_length"]
        output, sums = self._empty(query), np.full((B * MOST, N, L), np.nan, np.float32)
        for s, (of_query, of_keys) in enumerate(self._segments(query, keys, others)):
            found, log_sums = self._attend(
                of_query(query), of_keys(keys), of_keys(values), mask_type
            )
            of_query(output)[:] = found
            sums[s, :, : len(found)] = log_sums
        return jnp.asarray(output), jnp.asarray(sums)

    def backward(self, query, keys, values, *others, mask_type, layout, **arguments):
        *others, sums, output, d_output = others
        gradients = [self._empty(x) for x in (query, keys, values)]
        for s, (of_query, of_keys) in enumerate(self._segments(query, keys, others)):
            attend = lambda *arrays: self._attend(*arrays, mask_type)[0]  # noqa: E731
            arrays = of_query(query), of_keys(keys), of_keys(values)
            found, pull = jax.vjp(attend, *arrays)
            np.testing.assert_allclose(of_query(output), found, rtol=1e-5)
            assert np.isfinite(sums[s, :, : len(found)]).all()
            parts = zip((of_query, of_keys, of_keys), gradients, strict=True)
            for (of, into), gradient in zip(parts, pull(of_query(d_output)), strict=True):
                of(into)[:] = gradient
        return tuple(map(jnp.asarray, gradients))

    def _empty(self, x):
        return np.full(x.shape, np.nan, np.float32)

    def _segments(self, query, keys, others):
        """Yields for each segment the functions that return its tokens in arrays of all rows."""
        _, *lengths, of_queries, of_keys = map(np.asarray, others[:5])
        assert of_queries.shape == of_keys.shape == (B, MOST + 1)
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

    def _attend(self, query, keys, values, mask_type):
        shared = query.shape[1] // keys.shape[1]
        logits = jnp.einsum("qnd,knd->nqk", query, jnp.repeat(keys, shared, 1))
        if mask_type == self.MaskType.PADDING_CAUSAL:
            logits = jnp.where(jnp.tri(len(query), dtype=bool), logits, -jnp.inf)
        else:
            assert mask_type == self.MaskType.PADDING
        mixed = jnp.einsum("nqk,knd->qnd", jax.nn.softmax(logits), jnp.repeat(values, shared, 1))
        return mixed, jax.nn.logsumexp(logits, -1)


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setattr(attention_cudnn, "cudnn_attention", Cudnn())


def dense(query, keys, values, is_causal):
    """Returns the attention [B,N,L,D] over a mask of all positions; 0 in padding."""
    keys, values = (jnp.repeat(x, N // K, 1) for x in (keys, values))
    visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, :, None] > 0)
    visible = visible & np.tri(L, dtype=bool) if is_causal else visible
    logits = jnp.einsum("bnqd,bnkd->bnqk", query, keys)
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, -1e30))
    is_token = SEGMENTS[:, None, :, None] > 0
    return jnp.where(is_token, jnp.einsum("bnqk,bnkd->bnqd", weights, values), 0.0)


def arrays():
    generator = np.random.default_rng(5)
    shapes = (B, N, L, D), (B, K, L, D), (B, K, L, D)
    return [jnp.asarray(generator.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("is_causal", [True, False])
def test_segments_are_computed_as_with_a_mask(cudnn, is_causal):
    call = AttentionCall(is_causal=is_causal, has_segments=True, packed_segments=MOST)
    query, keys, values = arrays()
    operands = (query, keys, values, jnp.asarray(SEGMENTS), jnp.asarray(SEGMENTS))
    mixed, sums = attention_cudnn.forward(call, *operands)
    expected, pull = jax.vjp(lambda *x: dense(*x, is_causal), query, keys, values)
    np.testing.assert_allclose(mixed, expected, atol=1e-6)
    # The gradient of the output of padding must not matter.
    d_mixed = jnp.cos(jnp.arange(expected.size, dtype=jnp.float32)).reshape(expected.shape)
    found = attention_cudnn.backward(call, *operands, mixed, sums, d_mixed)
    for gradient, reference in zip(found, pull(d_mixed), strict=True):
        np.testing.assert_allclose(gradient, reference, atol=1e-5)


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
    output = packed.output(jnp.ones((B, L, N, D)))
    assert (
        np.isnan(output[1]).all() and np.isfinite(output[0]).all() and (output[2, :, 1:] >= 0).all()
    )


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
    assert attention_cudnn.knows_segments(call, kind) == expected
