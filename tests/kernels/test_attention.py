# tests: wings/kernels/attention.py, wings/kernels/attention_cuda.py, wings/kernels/attention_tpu.py
# tests: wings/kernels/attention_triton.py, wings/kernels/call.py, wings/kernels/distance_bias.py
# tests: wings/kernels/triton_rows.py
# tests: wings/kernels/weight_dropout.py
"""Compares the bodies of fused attention, on CPUs step by step, with attention in NumPy's order."""

import types
from unittest import mock

import msgspec
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import random_numbers
from lingvo_gshard.layers.attention.relative_bias import DistanceBuckets
from lingvo_gshard.layers.dropout import DropoutMask
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.kernels import attention_tpu
from lingvo_gshard.wings.kernels.attention import BACKWARD, FORWARD
from lingvo_gshard.wings.kernels.call import AttentionCall
from tests.layers.attention import attention_reference

# Sizes B, N, heads of keys, L, K, D of keys, D of values; and the static arguments.
CASES = {
    "causal_segments_shared_keys": ((2, 4, 2, 150, 150, 64, 64), {"is_causal": True}, True),
    "keys_of_another_row": ((1, 2, 2, 130, 300, 128, 128), {}, True),
    "window_cap_sinks": (
        (1, 4, 1, 200, 200, 128, 128),
        {"is_causal": True, "window": 50, "logit_cap": 5.0, "has_sinks": True},
        False,
    ),
    "window_both_ways": ((1, 2, 2, 140, 140, 256, 256), {"window": 30}, False),
    "later_queries_wider_keys": (
        (1, 2, 1, 128, 260, 192, 128),
        {"is_causal": True, "first_query": 132},
        False,
    ),
}
BODIES = ("tpu_interpreted", "cuda_interpreted")
KEY = [-7, 2**31 - 3]
# All of them drop weights. Rows are not whole tiles, and heads and rows have large offsets.
DROPPED = {
    "causal_segments_shared_keys": ((2, 4, 2, 150, 150, 64, 64), {"is_causal": True}, True),
    "keys_of_another_row": ((2, 3, 1, 130, 300, 16, 24), {}, True),
    "window_cap_sinks": (
        (1, 4, 2, 200, 200, 64, 64),
        {"is_causal": True, "window": 50, "logit_cap": 5.0, "has_sinks": True},
        False,
    ),
    "segments_sinks": ((2, 2, 2, 131, 131, 32, 32), {"has_sinks": True}, True),
}
# All of them have a learned bias. Numbers of buckets are no powers of two, or larger than a tile
# has distances.
BIASED = {
    "causal_segments_shared_keys": (
        (2, 4, 2, 150, 150, 64, 64),
        {"is_causal": True, "buckets": DistanceBuckets(32, 128, True)},
        True,
    ),
    "cap_sinks_both_ways": (
        (1, 4, 1, 200, 200, 128, 128),
        {"logit_cap": 5.0, "has_sinks": True, "buckets": DistanceBuckets(12, 40, False)},
        False,
    ),
    "later_queries": (
        (1, 2, 1, 128, 260, 192, 128),
        {"is_causal": True, "first_query": 132, "buckets": DistanceBuckets(6, 200, True)},
        False,
    ),
    "keys_of_another_row": (
        (1, 2, 2, 130, 300, 32, 24),
        {"buckets": DistanceBuckets(64, 130, False)},
        True,
    ),
    "window_dropout": (
        (1, 2, 2, 140, 140, 64, 64),
        {"window": 30, "dropout_rate": 0.3, "buckets": DistanceBuckets(8, 20, False)},
        False,
    ),
}


def operands_of(sizes, call, seed=0):
    """Returns the operands of a call, in the order of `Operands`, and the gradient of its output.

    Segments are sorted, begin with a padding segment, and have lengths that are not whole blocks.
    """
    batch, heads, shared, queries, keys, dim, value_dim = sizes
    generator = np.random.default_rng(seed)

    def normal(*shape):
        return generator.normal(size=shape).astype(np.float32)

    arrays = [
        normal(batch, heads, queries, dim) / np.sqrt(dim).astype(np.float32),
        normal(batch, shared, keys, dim),
        normal(batch, shared, keys, value_dim),
    ]
    if call.has_segments:
        segments = np.sort(generator.integers(0, 4, (batch, max(queries, keys))), 1)
        arrays += [segments[:, :n].astype(np.int32) for n in (queries, keys)]
    if call.dropout_rate:
        arrays += draw(DropoutMask(call.dropout_rate, tf.constant(KEY)), sizes)
    if call.buckets is not None:
        arrays.append(normal(heads, call.buckets.count))
    if call.has_sinks:
        arrays.append(normal(heads))
    return arrays, normal(batch, heads, queries, value_dim)


def draw(mask, sizes):
    """Returns the arrays of `DropoutOperands` for a call of these sizes."""
    batch, heads, _, queries, keys, _, _ = sizes
    terms = mask.index_terms([batch, heads, queries, keys])
    return [*(x.numpy() for x in terms), np.array(mask.key, np.int32).view(np.uint32)]


def visible_keys(call, shape, segments):
    """Returns bool [B,1,L,K]: whether each query sees each key."""
    batch, queries, keys = shape
    distance = np.arange(keys)[None] - (call.first_query + np.arange(queries)[:, None])
    visible = np.ones((batch, 1, queries, keys), bool)
    if call.is_causal:
        visible &= distance <= 0
    if call.window:
        visible &= np.abs(distance) <= call.window
    if segments:
        visible &= segments[0][:, None, :, None] == segments[1][:, None, None, :]
    return visible


def buckets_of_pairs(call, queries, keys):
    """Returns int32 [L,K]: the bucket of each query and key."""
    count, largest, is_causal = msgspec.structs.astuple(call.buckets)
    options = types.SimpleNamespace(
        relative_buckets=count, relative_max_distance=largest, is_causal=is_causal
    )
    # A causal query does not see the keys after it, which share the bucket of its own position.
    pairs = np.arange(keys)[None] - (call.first_query + np.arange(queries)[:, None])
    pairs = np.minimum(pairs, 0) if is_causal else pairs
    of_pair = np.vectorize(lambda distance: attention_reference.bucket(options, distance))
    return of_pair(pairs).astype(np.int32)


def dense(call, operands, d_mixed):
    """Returns the output, which queries see a key, and the gradients of all float operands."""
    query, keys, values, *others = (tf.constant(x) for x in operands)
    sinks = others.pop() if call.has_sinks else None
    biases = others.pop() if call.buckets is not None else None
    shape = (query.shape[0], query.shape[2], keys.shape[2])
    segments = [x.numpy() for x in others[: 2 * call.has_segments]]
    visible = visible_keys(call, shape, segments)
    factors = 1.0
    if call.dropout_rate:
        mask = DropoutMask(call.dropout_rate, tf.constant(KEY))
        factors = mask.factors([*query.shape[:3], shape[2]], tf.float32)
    d_mixed = d_mixed * visible.any(-1, keepdims=True)
    sources = [query, keys, values, *(x for x in (biases, sinks) if x is not None)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        times = query.shape[1] // keys.shape[1]
        logits = tf.einsum("bnld,bnkd->bnlk", query, tf.repeat(keys, times, 1))
        if call.logit_cap:
            logits = call.logit_cap * tf.tanh(logits / call.logit_cap)
        if biases is not None:
            logits += tf.gather(biases, buckets_of_pairs(call, *logits.shape[2:]), axis=1)
        logits = tf.where(visible, logits, -1e30)
        if sinks is not None:
            ones = tf.ones([*logits.shape[:3], 1])
            logits = tf.concat([logits, sinks[None, :, None, None] * ones], -1)
        weights = tf.nn.softmax(logits)[..., : keys.shape[2]] * factors
        mixed = tf.einsum("bnlk,bnkd->bnld", weights, tf.repeat(values, times, 1))
    return mixed, visible.any(-1), d_mixed, tape.gradient(mixed, sources, d_mixed)


class BodiesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(case=list(CASES), platform=BODIES)
    def test_a_body_computes_values_and_gradients_of_attention(self, case, platform):
        sizes, arguments, has_segments = CASES[case]
        self.check(platform, sizes, AttentionCall(**arguments, has_segments=has_segments))

    @parameterized.parameters(True, False)
    def test_one_kernel_for_tpus_computes_all_gradients(self, is_causal):
        # Three blocks of keys, each of two tiles that are computed one by one.
        sizes = (2, 4, 2, 700, 700, 64, 32)
        call = AttentionCall(is_causal=is_causal, logit_cap=5.0, has_segments=True)
        with mock.patch.object(attention_tpu, "_BLOCK", 128):
            self.assertEqual(attention_tpu._fused_block(call, 768, 256), 256)
            self.check("tpu_interpreted", sizes, call)

    @parameterized.parameters(
        # Keys, bytes of a key of a head, window; the keys of a block.
        (128, 256, 0, 128),
        (4096, 256, 0, 1024),
        (8192, 256, 0, 2048),
        # Too many blocks, too large a block, and a window, whose blocks are mostly hidden.
        (16384, 256, 0, 0),
        (8192, 512, 0, 0),
        (4096, 256, 1024, 0),
    )
    def test_one_kernel_computes_the_gradients_of_few_blocks(self, keys, width, window, expected):
        call = AttentionCall(is_causal=True, window=window)
        self.assertEqual(attention_tpu._fused_block(call, keys, width), expected)

    @parameterized.parameters(*DROPPED)
    def test_a_kernel_drops_the_weights_that_the_dense_layer_drops(self, case):
        sizes, arguments, has_segments = DROPPED[case]
        call = AttentionCall(**arguments, has_segments=has_segments, dropout_rate=0.3)
        self.check("cuda_interpreted", sizes, call)

    @parameterized.parameters(*BIASED)
    def test_a_kernel_adds_learned_biases_of_distances(self, case):
        sizes, arguments, has_segments = BIASED[case]
        call = AttentionCall(**arguments, has_segments=has_segments)
        self.check("cuda_interpreted", sizes, call)

    def test_indices_beyond_32_bits_wrap_as_in_the_dense_layer(self):
        """Terms that add up to more than 2^32 stand for a part of a large array."""
        shape = [1, 2, 128, 128]
        call = AttentionCall(dropout_rate=0.5)
        operands, _ = operands_of((*shape[:2], 2, *shape[2:], 16, 16), call)
        rows = np.array([2**32 - 5000], np.uint32)
        operands[3] = rows
        # Equal logits: an output is the mean of the values that are kept.
        operands[0] = np.zeros_like(operands[0])
        mixed, _ = FORWARD.body("cuda_interpreted")(call, *operands)
        index = rows + np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
        words = random_numbers.hashed(index, tf.constant(KEY)).numpy()
        factors = np.where(words >= 2**31, 2.0, 0.0)
        expected = np.einsum("bnlk,bnkd->bnld", factors, operands[2]) / shape[3]
        self.assertAllClose(mixed, expected, rtol=0, atol=5e-6)

    def check(self, platform, sizes, call):
        """Compares values and gradients of a body with those of dense attention."""
        operands, d_mixed = operands_of(sizes, call)
        expected, is_seen, d_mixed, gradients = dense(call, operands, d_mixed)
        mixed, log_sums = FORWARD.body(platform)(call, *operands)
        self.assertEqual(log_sums.shape, mixed.shape[:3])
        self.assertTrue(np.isfinite(mixed).all())
        seen = is_seen[..., None]
        self.assertAllClose(mixed * seen, expected * seen, rtol=0, atol=5e-6)
        found = BACKWARD.body(platform)(call, *operands, mixed, log_sums, d_mixed)
        self.assertLen(found, len(gradients))
        for ours, theirs in zip(found, gradients, strict=True):
            largest = np.abs(theirs).max()
            self.assertAllClose(ours, theirs, rtol=0, atol=5e-6 * max(largest, 1.0))

    @parameterized.parameters(*((body, 0.0) for body in BODIES), ("cuda_interpreted", 0.2))
    def test_bfloat16_is_as_near_to_float32_as_rounding_allows(self, platform, dropout_rate):
        call = AttentionCall(is_causal=True, dropout_rate=dropout_rate)
        operands, d_mixed = operands_of((1, 2, 1, 256, 256, 64, 64), call)
        narrow = [tf.cast(x, tf.bfloat16).numpy() for x in operands[:3]]
        mixed, log_sums = FORWARD.body(platform)(call, *narrow, *operands[3:])
        self.assertEqual(mixed.dtype, narrow[0].dtype)
        d_narrow = tf.cast(d_mixed, tf.bfloat16).numpy()
        found = BACKWARD.body(platform)(call, *narrow, *operands[3:], mixed, log_sums, d_narrow)
        widened = [x.astype(np.float32) for x in (*narrow, d_narrow)]
        expected, _, _, gradients = dense(call, [*widened[:3], *operands[3:]], widened[3])
        for ours, theirs in zip((mixed, *found), (expected, *gradients), strict=True):
            ours, largest = np.asarray(ours, np.float32), max(np.abs(theirs).max(), 1.0)
            self.assertAllClose(ours, theirs, rtol=0, atol=2e-2 * largest)

    @parameterized.product(
        call=[
            AttentionCall(window=100, first_query=1280),
            AttentionCall(window=100, first_query=-1280),
            AttentionCall(is_causal=True, first_query=-1100),
        ],
        platform=BODIES,
    )
    def test_queries_beyond_all_keys_are_finite_and_have_no_gradient(self, call, platform):
        """Positions hide all keys from whole blocks of queries, which the kernels skip."""
        operands, d_mixed = operands_of((1, 1, 1, 1280, 1280, 64, 64), call)
        expected, is_seen, d_mixed, gradients = dense(call, operands, d_mixed)
        mixed, log_sums = FORWARD.body(platform)(call, *operands)
        self.assertTrue(np.isfinite(mixed).all())
        self.assertLess(np.where(is_seen, -np.inf, log_sums).max(), -1e29)
        seen = is_seen[..., None]
        self.assertAllClose(mixed * seen, expected * seen, rtol=0, atol=5e-6)
        found = BACKWARD.body(platform)(call, *operands, mixed, log_sums, d_mixed)
        for ours, theirs in zip(found, gradients, strict=True):
            largest = np.abs(theirs).max()
            self.assertAllClose(ours, theirs, rtol=0, atol=5e-6 * max(largest, 1.0))


class CallTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(
        is_causal=(False, True), window=(0, 1, 3), first_query=(-6, -3, -1, 0, 2, 4, 7)
    )
    def test_hides_all_keys_says_what_a_mask_of_all_pairs_says(
        self, is_causal, window, first_query
    ):
        call = AttentionCall(is_causal=is_causal, window=window, first_query=first_query)
        for queries, keys in ((4, 4), (2, 5), (1, 1)):
            visible = visible_keys(call, (1, queries, keys), [])
            self.assertEqual(call.hides_all_keys(queries, keys), not visible.any(-1).all())


class ObstaclesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("tpu", (1, 2, 64, 128), tf.bfloat16, "rows of fewer than 128"),
        ("tpu", (1, 2, 256, 128), tf.float64, "float64"),
        ("cuda", (1, 2, 256, 512), tf.bfloat16, "heads of at most 256, not 512"),
        ("cuda", (1, 2, 256, 128), tf.float64, "float64"),
        ("cuda", (1, 2, 256, 128), tf.bfloat16, ""),
        ("tpu_interpreted", (1, 2, 256, 64), tf.float32, ""),
    )
    def test_what_no_kernel_computes_is_said(self, platform, shape, dtype, expected):
        x = tf.zeros(shape, dtype)
        found = kernels.attention.obstacle(platform, AttentionCall(), x, x, x)
        self.assertIn(expected, found)
        self.assertEqual(bool(expected), bool(found))

    def test_only_the_kernel_for_cuda_has_learned_biases(self):
        x, call = tf.zeros((1, 2, 256, 64)), AttentionCall(buckets=DistanceBuckets(8, 20, True))
        self.assertEqual(kernels.attention.obstacle("cuda", call, x, x, x), "")
        self.assertIn("learned bias", kernels.attention.obstacle("tpu", call, x, x, x))

    def test_only_the_kernel_for_cuda_drops_weights(self):
        x, call = tf.zeros((1, 2, 256, 64), tf.bfloat16), AttentionCall(dropout_rate=0.1)
        self.assertEqual(kernels.attention.obstacle("cuda", call, x, x, x), "")
        self.assertIn("cannot drop weights", kernels.attention.obstacle("tpu", call, x, x, x))


if __name__ == "__main__":
    testing.main()
