"""Compares products with int8 weights with NumPy."""

from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers import products
from lingvo_gshard.wings.inference import stored_weights
from lingvo_gshard.wings.inference.stored_weights import INT8, INT8_WEIGHTS, StoredPrecision

# Equation, shape of x, shape of the weight, and the axes of the weight that are summed over.
PRODUCTS = [
    ("BLM,MH->BLH", (2, 3, 8), (8, 5), (0,)),
    ("BLM,MND->BLND", (2, 3, 8), (8, 2, 5), (0,)),
    ("BLND,NDM->BLM", (2, 3, 2, 4), (2, 4, 5), (0, 1)),
    ("BLM,VM->BLV", (2, 3, 8), (5, 8), (1,)),
    ("CM,MH->CH", (1, 8), (8, 5), (0,)),
]


def stored(weight, layout, contracted, precision):
    with context.scope(), context.override_extension(StoredPrecision, name=precision):
        return stored_weights.store(tf.constant(weight), layout, contracted)


def stored_for(equation, weight, axes, precision):
    layout = equation.partition("->")[0].split(",")[1]
    return stored(weight, layout, "".join(layout[axis] for axis in axes), precision)


def rounded(x, axes):
    """Returns int8 values of x and their scale, by NumPy alone."""
    scale = np.abs(x).max(axis=axes, keepdims=True) / 127.0
    return np.rint(x / np.where(scale > 0, scale, 1)).astype(np.int8), scale


def arrays(shape_x, shape_w):
    rng = np.random.default_rng(0)
    # Channels and rows of very different size, so that each needs a scale of its own.
    x = rng.normal(size=shape_x) * 10.0 ** rng.integers(-3, 3, (*shape_x[:-1], 1))
    w = rng.normal(size=shape_w) * 10.0 ** rng.integers(-3, 3, shape_w[-1:])
    return x.astype(np.float32), w.astype(np.float32)


class StoredWeightsTest(testing.TestCase, parameterized.TestCase):
    """Tests products whose weights all count as large, unless a test says otherwise."""

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(stored_weights, "SMALL", 0))

    @parameterized.parameters(*PRODUCTS)
    def test_int8_products_are_those_of_rounded_rows_and_channels(
        self, equation, shape_x, shape_w, axes
    ):
        x, w = arrays(shape_x, shape_w)
        weight = stored_for(equation, w, axes, INT8)
        self.assertEqual(weight[INT8].dtype, tf.int8)
        found = products.multiply(equation, tf.constant(x), weight).numpy()

        values_x, scale_x = rounded(x, tuple(range(x.ndim))[-len(axes) :])
        values_w, scale_w = rounded(w, axes)
        sums = np.einsum(equation, values_x.astype(np.int64), values_w.astype(np.int64))
        outer, columns = x.shape[: -len(axes)], sums.shape[x.ndim - len(axes) :]
        row_scale = scale_x.reshape(*outer, *[1] * len(columns))
        expected = sums * row_scale * scale_w.reshape(columns)
        self.assertAllClose(found, expected, rtol=1e-5, atol=0)

    @parameterized.parameters(*PRODUCTS)
    def test_products_of_int8_weights_are_those_of_rounded_weights(
        self, equation, shape_x, shape_w, axes
    ):
        x, w = arrays(shape_x, shape_w)
        weight = stored_for(equation, w, axes, INT8_WEIGHTS)
        found = products.multiply(equation, tf.constant(x), weight).numpy()
        values, scale = rounded(w, axes)
        self.assertAllClose(found, np.einsum(equation, x, values * scale), rtol=1e-4, atol=1e-5)
        self.assertAllClose(
            stored_weights.restore(weight).numpy(), values * scale, rtol=1e-6, atol=0
        )

    def test_a_row_has_the_same_product_alone_and_among_others(self):
        x, w = arrays((32, 3000), (3000, 64))
        weight = stored(w, "MH", "M", INT8)
        multiply = tf.function(
            lambda x: products.multiply("CM,MH->CH", x, weight),
            jit_compile=True,
            reduce_retracing=False,
        )
        together = multiply(tf.constant(x)).numpy()
        for row in (0, 31):
            self.assertAllEqual(multiply(tf.constant(x[row : row + 1]))[0], together[row])

    def test_zero_rows_and_zero_channels_have_zero_products(self):
        x, w = arrays((4, 8), (8, 5))
        x[1], w[:, 2] = 0, 0
        found = products.multiply("CM,MH->CH", tf.constant(x), stored(w, "MH", "M", INT8)).numpy()
        self.assertTrue(np.isfinite(found).all())
        self.assertFalse(found[1].any())
        self.assertFalse(found[:, 2].any())
        self.assertTrue(found[0, :2].all())

    def test_rows_of_a_stored_table_are_those_of_the_rounded_table(self):
        _, table = arrays((1, 1), (6, 8))
        ids = np.array([[0, 5], [5, 3]])
        values, scale = rounded(table, (1,))
        for precision in (INT8, INT8_WEIGHTS):
            found = products.look_up(stored(table, "VM", "M", precision), tf.constant(ids)).numpy()
            self.assertAllClose(found, (values * scale)[ids], rtol=1e-6, atol=0)

    def test_small_weights_keep_float_products_and_can_be_restored_alone(self):
        self.enter_context(mock.patch.object(stored_weights, "SMALL", 50))
        tree = {"small": (7, 7), "large": (5, 10), "experts": (4, 7, 7)}
        layouts = {"small": "MH", "large": "MH", "experts": "EMH"}
        tree = {n: stored(np.ones(s, np.float32), layouts[n], "M", INT8) for n, s in tree.items()}
        self.assertIn(INT8_WEIGHTS, tree["small"])
        self.assertIn(INT8, tree["large"])
        # Each expert has a product of its own.
        self.assertIn(INT8_WEIGHTS, tree["experts"])
        restored = stored_weights.restore([tree, tf.zeros([3])], only_small=True)
        self.assertEqual(restored[0]["small"].dtype, tf.float32)
        self.assertTrue(stored_weights.is_stored(restored[0]["large"]))
        self.assertEqual(restored[1].shape, [3])

    def test_without_a_precision_weights_stay_as_they_are(self):
        weight = tf.ones([2, 3])
        self.assertIs(stored_weights.store(weight, "MH", "M"), weight)

    def test_an_equation_that_is_no_product_of_matrices_is_refused(self):
        weight = stored(np.ones((3, 8, 5), np.float32), "EMH", "M", INT8)
        with self.assertRaisesRegex(ValueError, "EGCM,EMH->EGCH"):
            products.multiply("EGCM,EMH->EGCH", tf.ones([3, 1, 2, 8]), weight)


if __name__ == "__main__":
    testing.main()
