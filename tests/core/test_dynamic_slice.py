"""Compares dynamic slices and updates with NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import shapes

TENSOR = np.arange(30, dtype=np.float32).reshape(6, 5)


def compiled(function):
    return tf.function(function, jit_compile=True, autograph=False)


@pytest.mark.parametrize(("start", "first"), [(0, 0), (3, 3), (5, 4)])
def test_reads_a_slice(start, first):
    read = compiled(lambda x, start: shapes.read_slice(x, start, 2))
    np.testing.assert_array_equal(read(TENSOR, tf.constant(start)), TENSOR[first : first + 2])


@pytest.mark.parametrize(("start", "first"), [(0, 0), (3, 3), (5, 4)])
def test_writes_a_slice(start, first):
    part = -np.ones((2, 5), np.float32)
    expected = TENSOR.copy()
    expected[first : first + 2] = part
    written = compiled(shapes.write_slice)(TENSOR, part, tf.constant(start))
    np.testing.assert_array_equal(written, expected)
