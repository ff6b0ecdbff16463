# tests: core/shapes.py
"""Compares dynamic slices and updates with NumPy."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import shapes

TENSOR = np.arange(30, dtype=np.float32).reshape(6, 5)


def compiled(function):
    return tf.function(function, jit_compile=True, autograph=False)


class DynamicSliceTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters((0, 0), (3, 3), (5, 4))
    def test_reads_a_slice(self, start, first):
        read = compiled(lambda x, start: shapes.read_slice(x, start, 2))
        self.assertAllEqual(read(TENSOR, tf.constant(start)), TENSOR[first : first + 2])

    @parameterized.parameters((0, 0), (3, 3), (5, 4))
    def test_writes_a_slice(self, start, first):
        part = -np.ones((2, 5), np.float32)
        expected = TENSOR.copy()
        expected[first : first + 2] = part
        written = compiled(shapes.write_slice)(TENSOR, part, tf.constant(start))
        self.assertAllEqual(written, expected)


if __name__ == "__main__":
    testing.main()
