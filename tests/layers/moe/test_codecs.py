"""Compares codecs of exchanged rows with NumPy and tests their error bounds."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.layers.moe import exchange

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


@hypothesis.given(finite)
def test_int8_error_is_at_most_half_a_step(x):
    steps, scale = exchange.CODECS["int8"].encode(tf.constant(x))
    assert steps.dtype == tf.int8 and steps.shape == x.shape and scale.shape == ROWS
    exact_scale = np.abs(x.astype(np.float64)).max(-1) / 127
    np.testing.assert_allclose(scale, exact_scale, rtol=1e-6, atol=1e-38)
    error = np.abs(round_trip("int8", x) - x.astype(np.float64))
    assert (error <= exact_scale[..., None] * 0.50002 + 1e-37).all()


def test_int8_rounds_to_nearest_even():
    x = np.array([127, 0.5, 1.5, -0.5, -2.5, 3.5001], np.float32).reshape(1, 1, 1, 6)
    for scale in (1.0, 2.0**-20, 2.0**40):
        steps, _ = exchange.CODECS["int8"].encode(tf.constant(x * np.float32(scale)))
        assert steps.numpy().ravel().tolist() == [127, 0, 2, 0, -2, 4]


def test_int8_preserves_zero_rows():
    x = SOME.copy()
    x[0, 1] = 0
    read = round_trip("int8", x)
    assert not read[0, 1].any() and read[0, 0].all()


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_values_affect_only_their_row(name, bad):
    x = SOME.copy()
    x[1, 2, 0, 3] = bad
    read = round_trip(name, x)
    assert not np.isfinite(read[1, 2, 0, 3])
    assert np.isfinite(np.delete(read.reshape(-1, 5), (1 * 3 + 2) * 2, axis=0)).all()


@hypothesis.given(hnp.arrays(np.uint32, 24))
def test_bfloat16_equals_the_cast_of_tensorflow(bits):
    x = bits.view(np.float32).reshape(*ROWS, 2)
    (sent,) = exchange.CODECS["bfloat16"].encode(tf.constant(x))
    assert sent.dtype == tf.bfloat16
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    normal = ~(np.abs(expected) < 2.0**-126)
    read = round_trip("bfloat16", x)
    np.testing.assert_array_equal(read[normal], expected[normal])
    assert (np.abs(read[~normal]) <= 2.0**-126).all()


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_compiled_codecs_round_too(name):
    """XLA may remove a cast to bfloat16 and back."""
    codec = exchange.CODECS[name]
    compiled = tf.function(
        lambda x: codec.decode(codec.encode(x), x.dtype), autograph=False, jit_compile=True
    )
    found = compiled(tf.constant(SOME))
    np.testing.assert_array_equal(found, round_trip(name, SOME))
    assert not np.array_equal(found, SOME)


@pytest.mark.parametrize("name", exchange.CODECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_decoded_rows_have_their_original_dtype(name, dtype):
    x = tf.cast(SOME, dtype)
    codec = exchange.CODECS[name]
    read = codec.decode(codec.encode(x), x.dtype)
    assert read.dtype == x.dtype
    np.testing.assert_allclose(tf.cast(read, tf.float32), SOME, atol=0.03)
