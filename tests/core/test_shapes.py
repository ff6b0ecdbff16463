"""Tests sizes of static shapes."""

import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.shapes import known_sizes


class KnownSizesTest(testing.TestCase, parameterized.TestCase):
    def test_known_sizes(self):
        self.assertEqual(known_sizes(tf.TensorShape([2, 3])), [2, 3])
        self.assertEqual(known_sizes(tf.TensorShape([])), [])

    @parameterized.parameters(([2, None],), None)
    def test_rejects_unknown_sizes(self, shape):
        with self.assertRaisesRegex(ValueError, "unknown"):
            known_sizes(tf.TensorShape(shape))


if __name__ == "__main__":
    testing.main()
