# tests: wings/low_precision/codecs.py, layers/moe/exchange.py
"""Compares codecs of exchanged rows with NumPy and tests their error bounds."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe import exchange

NAMES = [name for name, _ in exchange.CODECS.items()]
ROWS = (2, 3, 2)
SOME = np.random.default_rng(1).normal(size=(*ROWS, 5)).astype(np.float32)

finite = hnp.arrays(
    np.float32,
    (*ROWS, 5),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    fill=st.nothing(),
)


def round_trip(name: str, x) -> np.ndarray:
    codec = exchange.CODECS[name]
    return codec.decode(codec.encode(tf.constant(x)), tf.float32).numpy()


class CodecsTest(testing.TestCase, parameterized.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(finite)
    def test_int8_error_is_at_most_half_a_step(self, x):
        steps, scale = exchange.CODECS["int8"].encode(tf.constant(x))
        self.assertEqual(steps.dtype, tf.int8)
        self.assertEqual(steps.shape, x.shape)
        self.assertEqual(scale.shape, ROWS)
        exact_scale = np.abs(x.astype(np.float64)).max(-1) / 127
        self.assertAllClose(scale, exact_scale, rtol=1e-6, atol=1e-38)
        error = np.abs(round_trip("int8", x) - x.astype(np.float64))
        self.assertTrue((error <= exact_scale[..., None] * 0.50002 + 1e-37).all())

    def test_int8_rounds_to_nearest_even(self):
        x = np.array([127, 0.5, 1.5, -0.5, -2.5, 3.5001], np.float32).reshape(1, 1, 1, 6)
        for scale in (1.0, 2.0**-20, 2.0**40):
            steps, _ = exchange.CODECS["int8"].encode(tf.constant(x * np.float32(scale)))
            self.assertEqual(steps.numpy().ravel().tolist(), [127, 0, 2, 0, -2, 4])

    def test_int8_preserves_zero_rows(self):
        x = SOME.copy()
        x[0, 1] = 0
        read = round_trip("int8", x)
        self.assertFalse(read[0, 1].any())
        self.assertTrue(read[0, 0].all())

    @parameterized.parameters(1, 5, 128, 130, 300)
    def test_fp8_has_a_power_of_two_for_each_128_numbers(self, size):
        draw = np.random.default_rng(size)
        x = draw.normal(size=(*ROWS, size)) * 2.0 ** draw.integers(-20, 20, (*ROWS, size))
        x = x.astype(np.float32)
        bits, scale = exchange.CODECS["fp8"].encode(tf.constant(x))
        self.assertEqual((bits.dtype, bits.shape), (tf.uint8, x.shape))
        self.assertEqual(scale.shape, (*ROWS, -(-size // 128)))
        expected = np.zeros_like(x)
        for start in range(0, size, 128):
            block = x[..., start : start + 128]
            power = np.exp2(np.ceil(np.log2(np.abs(block).max(-1, keepdims=True) / 448)))
            narrow = (block / power).astype(ml_dtypes.float8_e4m3fn)
            expected[..., start : start + 128] = narrow.astype(np.float32) * power
        read = round_trip("fp8", x)
        self.assertAllEqual(read, expected)
        largest = np.abs(x).max(-1, keepdims=True)
        self.assertTrue((np.abs(read - x) <= np.maximum(np.abs(x) / 16, largest / 2**17)).all())

    def test_fp8_has_the_bits_of_e4m3(self):
        """448 beside the values makes the scale 1."""
        every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        every = every[np.isfinite(every)]
        middles = (every[1:] + every[:-1]) / 2
        x = np.concatenate([every, middles, np.nextafter(middles, 0), [448]]).astype(np.float32)
        x = np.stack([x, np.full_like(x, 448)], axis=-1)[None, None]
        bits, _ = exchange.CODECS["fp8"].encode(tf.constant(x))
        self.assertAllEqual(bits, x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))

    def test_fp8_preserves_zeros(self):
        self.assertFalse(round_trip("fp8", np.zeros((*ROWS, 130), np.float32)).any())

    @parameterized.product(name=["bfloat16", "fp8", "int8"], bad=[np.nan, np.inf, -np.inf])
    def test_nonfinite_values_affect_only_their_row(self, name, bad):
        x = SOME.copy()
        x[1, 2, 0, 3] = bad
        read = round_trip(name, x)
        self.assertFalse(np.isfinite(read[1, 2, 0, 3]))
        self.assertTrue(np.isfinite(np.delete(read.reshape(-1, 5), (1 * 3 + 2) * 2, axis=0)).all())

    @hypothesis.settings(deadline=None)
    @hypothesis.given(hnp.arrays(np.uint32, 24))
    def test_bfloat16_equals_the_cast_of_tensorflow(self, bits):
        x = bits.view(np.float32).reshape(*ROWS, 2)
        (sent,) = exchange.CODECS["bfloat16"].encode(tf.constant(x))
        self.assertEqual(sent.dtype, tf.bfloat16)
        expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        normal = ~(np.abs(expected) < 2.0**-126)
        read = round_trip("bfloat16", x)
        self.assertAllEqual(read[normal], expected[normal])
        self.assertTrue((np.abs(read[~normal]) <= 2.0**-126).all())

    @parameterized.parameters("bfloat16", "fp8", "int8")
    def test_compiled_codecs_round_too(self, name):
        """XLA may remove a cast to bfloat16 and back."""
        codec = exchange.CODECS[name]
        compiled = tf.function(
            lambda x: codec.decode(codec.encode(x), x.dtype), autograph=False, jit_compile=True
        )
        found = compiled(tf.constant(SOME))
        self.assertAllEqual(found, round_trip(name, SOME))
        self.assertNotAllEqual(found, SOME)

    @parameterized.product(name=NAMES, dtype=["float32", "bfloat16", "float16"])
    def test_decoded_rows_have_their_original_dtype(self, name, dtype):
        x = tf.cast(SOME, dtype)
        codec = exchange.CODECS[name]
        read = codec.decode(codec.encode(x), x.dtype)
        self.assertEqual(read.dtype, x.dtype)
        self.assertAllClose(tf.cast(read, tf.float32), SOME, rtol=0.07, atol=0.03)


if __name__ == "__main__":
    testing.main()
