# tests: wings/kernels/cache_attention.py, wings/kernels/cache_call.py, wings/kernels/cache_tpu.py
# tests: wings/kernels/cache_triton.py, wings/inference/layers/cached_fused.py
"""Compares the kernels of attention over a cache, on CPUs step by step, with loops in NumPy."""

import functools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.kernel_use import KernelUse
from lingvo_gshard.core.lazy import jax
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.mask import Reach
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.runtime.lowering.lowering import lower
from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.sharding import annotate
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.inference.layers import decoding_weights, extend
from lingvo_gshard.wings.inference.layers.attention import cached_heads
from lingvo_gshard.wings.inference.layers.cached import CacheView
from lingvo_gshard.wings.kernels.cache_attention import FORWARD
from lingvo_gshard.wings.kernels.cache_call import CacheCall

PLATFORMS = ("tpu_interpreted", "cuda_interpreted")
# Sizes N, heads of keys, K, D of keys, D of values; the newest slot; how many slots before it each
# row sees; and the static arguments.
CASES = {
    "shared_heads": ((4, 2, 384, 64, 64), 200, (0, 5, 150, 200), {}),
    "around_the_end": ((2, 2, 256, 64, 64), 70, (100, 255, 190, 71), {}),
    "window": ((2, 1, 512, 64, 64), 300, (0, 100, -1, 60), {"window": 100}),
    "window_around_the_end": ((2, 1, 384, 64, 64), 20, (128, 127, 4, 21), {"window": 128}),
    "no_visible_slot": ((2, 1, 128, 64, 64), 127, (-1, 127, -1, 3), {}),
    "cap_sinks_wider_keys": (
        (6, 2, 256, 128, 64),
        255,
        (255, 3, -1, 140),
        {"logit_cap": 3.0, "has_sinks": True},
    ),
}


def operands_of(sizes, newest, reach, call, seed=0):
    """Returns the arrays of a call in float32."""
    heads, shared, slots, dim, value_dim = sizes
    generator = np.random.default_rng(seed)

    def normal(*shape):
        return generator.normal(size=shape).astype(np.float32)

    rows = len(reach)
    query = normal(rows, heads, dim) / np.sqrt(dim).astype(np.float32)
    arrays = [query, normal(rows, shared, slots, dim)]
    if call.has_values:
        arrays.append(normal(rows, shared, slots, value_dim))
    arrays += [np.array([newest], np.int32), np.array(reach, np.int32)]
    return [*arrays, normal(heads)] if call.has_sinks else arrays


def loops(call, operands):
    """Returns the output [B,N,D], one row and head at a time, over the visible slots in order."""
    query, keys, *others = operands
    values = others.pop(0) if call.has_values else keys
    (newest,), reach, *sinks = others
    group = query.shape[1] // keys.shape[1]
    mixed = np.zeros((*query.shape[:2], values.shape[3]))
    for row, head in np.ndindex(*query.shape[:2]):
        at = [(newest - age) % keys.shape[2] for age in range(reach[row] + 1)]
        logits = keys[row, head // group, at].astype(np.float64) @ query[row, head]
        if call.logit_cap:
            logits = call.logit_cap * np.tanh(logits / call.logit_cap)
        largest = max([0.0, *logits])
        weights = np.exp(logits - largest)
        total = weights.sum() + (np.exp(sinks[0][head] - largest) if sinks else 0)
        if at:
            mixed[row, head] = weights @ values[row, head // group, at] / total
    return mixed


class BodiesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(case=list(CASES), platform=PLATFORMS)
    def test_a_body_computes_attention_to_the_visible_slots(self, case, platform):
        sizes, newest, reach, arguments = CASES[case]
        call = CacheCall(**arguments)
        operands = operands_of(sizes, newest, reach, call)
        (mixed,) = FORWARD.body(platform)(call, *operands)
        self.assertAllClose(mixed, loops(call, operands), rtol=0, atol=5e-6)

    @parameterized.product(dim=(72, 576), platform=PLATFORMS)
    def test_keys_that_are_the_values_are_one_array(self, dim, platform):
        """A latent cache has heads of no multiple of the lanes; DeepSeek-V3's have 512 and 64."""
        call = CacheCall(has_values=False)
        operands = operands_of((8, 1, 256, dim, dim), 30, (20, 200), call)
        (mixed,) = FORWARD.body(platform)(call, *operands)
        self.assertAllClose(mixed, loops(call, operands), rtol=0, atol=5e-6)

    @parameterized.product(newest=(40, 95, 99), platform=PLATFORMS)
    def test_a_ring_that_blocks_do_not_divide_is_read_to_its_end(self, newest, platform):
        call = CacheCall()
        operands = operands_of((2, 1, 100, 32, 32), newest, (99, 7, 60, 41), call)
        (mixed,) = FORWARD.body(platform)(call, *operands)
        self.assertAllClose(mixed, loops(call, operands), rtol=0, atol=5e-6)

    @parameterized.parameters(*PLATFORMS)
    def test_hidden_blocks_are_not_read(self, platform):
        """NaN in blocks that no row sees does not reach the output."""
        call = CacheCall()
        operands = operands_of((4, 2, 4096, 128, 128), 3000, (100, 0, 50, -1), call)
        expected = loops(call, operands)
        for array in operands[1:3]:
            array[:, :, :2048] = np.nan
            array[:, :, 3584:] = np.nan
        (mixed,) = FORWARD.body(platform)(call, *operands)
        self.assertAllClose(mixed[:3], expected[:3], rtol=0, atol=5e-6)

    @parameterized.parameters(*PLATFORMS)
    def test_bfloat16_is_as_near_to_float32_as_rounding_allows(self, platform):
        call = CacheCall()
        operands = operands_of((4, 2, 256, 64, 64), 20, (255, 40, 3), call)
        narrow = [tf.cast(x, tf.bfloat16).numpy() for x in operands[:3]] + operands[3:]
        (mixed,) = FORWARD.body(platform)(call, *narrow)
        self.assertEqual(mixed.dtype, narrow[0].dtype)
        widened = [x.astype(np.float32) for x in narrow[:3]] + operands[3:]
        self.assertAllClose(mixed.astype(np.float32), loops(call, widened), rtol=0, atol=2e-2)


@functools.cache
def extended(mesh, platform, key_heads=2):
    """Returns the output of a new token of each row, and the attention's record of kernels."""
    params = SelfAttention.params().set(
        model_dim=32, num_heads=4, num_key_value_heads=key_heads, window=40, use_sinks=True
    )
    layer = params.instantiate(path="attention")
    specs = layer.variable_specs()
    partitioning = Partitioning.make(mesh, "data_tensor").on(platform)
    rows, slots = 4, 96

    def step(x_BLM, keys_BNKD, values_BNKD, past_B, first_slot, *weights):
        ages_K = tf.math.floormod(first_slot - tf.range(slots), slots)
        is_visible_BLK = (ages_K[None] <= past_B[:, None])[:, None]
        view = CacheView(past_B[:, None], is_visible_BLK, -ages_K[None], first_slot, past_B)
        mask_BL = tf.constant([[1], [1], [0], [1]])
        theta = decoding_weights(layer, specs.pack(weights))
        times = cached_heads(layer) // key_heads
        keys_BNKD, values_BNKD = (tf.repeat(x, times, axis=1) for x in (keys_BNKD, values_BNKD))
        cache = NestedMap(key=[annotate(keys_BNKD, "BNKD")], value=[annotate(values_BNKD, "BNKD")])
        y_BLM, cache = extend(
            layer, theta, annotate(x_BLM, "BLM"), view, view.visible(mask_BL, Reach(40)), cache
        )
        # What a row without a new token gets is not defined.
        y_BLM *= tf.cast(mask_BL, tf.float32)[..., None]
        return [("y", y_BLM, None), ("keys", cache.key[0][:, ::times], None)]

    generator = np.random.default_rng(4)
    arrays = [
        generator.normal(size=(rows, 1, 32)),
        generator.normal(size=(rows, key_heads, slots, 8)),
        generator.normal(size=(rows, key_heads, slots, 8)),
        np.array([95, 20, 5, 60], np.int32),
        np.array(30, np.int32),
        *(np.array(x) * 2 for x in layer.init(2).flatten()),
    ]
    arrays = [x if x.dtype == np.int32 else x.astype(np.float32) for x in arrays]
    inputs = [Array(f"x{i}", x.shape, x.dtype.name, ((),) * x.ndim) for i, x in enumerate(arrays)]
    made = lower("step", step, inputs, partitioning)
    executable = Executable(made, jax.devices()[: made.mesh.size])
    placed = [
        a.put(x, executable.input_shardings[0].mesh)
        for a, x in zip(made.inputs, arrays, strict=True)
    ]
    return [np.asarray(x) for x in executable(*placed)], made.kernels


class LayersTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("data=1,model=1", "tpu_interpreted", 2),
        ("data=2,model=2", "cuda_interpreted", 2),
        # Two heads of keys, which four devices split when they are repeated.
        ("data=2,model=4", "tpu_interpreted", 2),
        ("data=2,model=4", "tpu_interpreted", 1),
    )
    def test_a_layer_extends_its_cache_as_without_kernels(self, mesh, platform, key_heads):
        expected, none = extended("data=1,model=1", "", key_heads)
        self.assertEqual(none, ())
        self.devices(8)
        found, uses = extended(mesh, platform, key_heads)
        self.assertEqual(uses, (KernelUse("attention", "attention over the cache"),))
        self.assertAllClose(found, expected, rtol=0, atol=5e-6)


class ObstaclesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("tpu", (2, 2, 100, 64), tf.bfloat16, ""),
        ("tpu", (2, 2, 4100, 256), tf.bfloat16, "blocks of 4100 slots with 2 heads"),
        ("tpu", (2, 64, 128, 256), tf.float32, "64 heads of keys of 256"),
        ("tpu", (2, 2, 256, 64), tf.float64, "float64"),
        ("tpu", (2, 1, 256, 576), tf.bfloat16, ""),
        ("cuda", (2, 1, 256, 576), tf.bfloat16, ""),
        ("cuda", (2, 1, 256, 1088), tf.bfloat16, "heads of at most 576, not 1088"),
        ("cuda", (2, 1, 256, 360), tf.bfloat16, "heads of 360 are not a multiple of 16"),
        ("cuda", (2, 2, 8, 64), tf.bfloat16, "8 slots are fewer than the 16 of the smallest"),
        ("cuda", (2, 2, 100, 64), tf.bfloat16, ""),
    )
    def test_what_no_kernel_computes_is_said(self, platform, shape, dtype, expected):
        keys, query = tf.zeros(shape, dtype), tf.zeros((*shape[:2], shape[3]), dtype)
        found = kernels.cache_attention.obstacle(platform, CacheCall(), query, keys, keys)
        self.assertIn(expected, found)
        self.assertEqual(bool(expected), bool(found))

    def test_a_window_meets_few_blocks(self):
        self.assertEqual(CacheCall().most_blocks(1024, 128), 8)
        self.assertEqual(CacheCall(window=128).most_blocks(1024, 128), 2)
        self.assertEqual(CacheCall(window=129).most_blocks(1024, 128), 3)
        self.assertEqual(CacheCall(window=4096).most_blocks(1024, 128), 8)

    def test_a_window_reads_its_share_of_the_slots(self):
        self.assertEqual(CacheCall().read_share(1024, 128), 1.0)
        self.assertEqual(CacheCall(window=128).read_share(1024, 128), 0.25)
        self.assertEqual(CacheCall(window=4096).read_share(1024, 128), 1.0)


if __name__ == "__main__":
    testing.main()
