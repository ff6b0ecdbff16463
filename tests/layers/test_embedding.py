"""Compares embeddings, positions and the softmax with their formulas."""

import math

import ml_dtypes
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.embedding import (
    LearnedPositions,
    SinusoidalPositions,
    Softmax,
    TokenEmbedding,
)
from lingvo_gshard.layers.products import ProductContext
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.functions.partition import partition

V, M = 7, 4
IDS = np.array([[0, 3, 6], [1, 1, 2]], np.int32)
X = np.random.default_rng(1).normal(size=(2, 3, M)).astype(np.float32)


def make(cls, **values):
    layer = cls.params().set(**{"model_dim": M, **values}).instantiate(path="layer")
    return layer, layer.init(1)


class EmbeddingTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(("float32", False), ("bfloat16", False), ("bfloat16", True))
    def test_rows_exchanged_between_devices_and_their_gradients(self, dtype, is_tied):
        """Rows are rounded to the type of tables, and so is the sum of a row's gradients.

        A table that is the weight of a softmax as well is rounded before devices gather it.
        """
        options = {"vocabulary_size": 64, "model_dim": 8, "is_softmax_weight": is_tied}
        layer, theta = make(TokenEmbedding, scale=1.0, **options)
        generator = np.random.default_rng(2)
        ids = generator.integers(0, 64, (8, 6)).astype(np.int32)
        weights = generator.normal(size=(8, 6, 8)).astype(np.float32)

        def step(table, ids, weights):
            scope = context.override_extension(ProductContext, table_dtype=dtype)
            with context.scope(training=True, seed=tf.constant([1, 0])), scope:
                with tf.GradientTape() as tape:
                    tape.watch(table)
                    rows = layer.fprop(NestedMap(table=table), ids)
                return rows, tf.convert_to_tensor(tape.gradient(rows, table, weights))

        split = partition(step, "data=8", "fsdp", layouts=["weights:VM", "BL", "BLM"])
        arrays, table_bytes = (theta.table, ids, weights), 64 * 8 * tf.as_dtype(dtype).size
        rows, gradient = split(*arrays)
        collectives = split.compile(*arrays).collectives()
        self.assertIn("all-to-all", {c.kind for c in collectives})
        of_table = [c.kind for c in collectives if c.bytes >= table_bytes]
        self.assertEqual(of_table, ["all-gather"] if is_tied else [])
        narrow = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
        table = theta.table.numpy().astype(narrow).astype(np.float32)
        self.assertAllEqual(rows, table[ids])
        expected = np.zeros((64, 8), np.float32)
        np.add.at(expected, ids, weights)
        expected = expected.astype(narrow).astype(np.float32)
        self.assertAllClose(gradient, expected, rtol=1e-6 if dtype == "float32" else 2**-8)

    @parameterized.parameters("data=1", "data=1,fsdp=1", "data=1,fsdp=2")
    def test_axes_of_one_device_exchange_no_rows(self, mesh):
        layer, theta = make(TokenEmbedding, scale=1.0, vocabulary_size=64)
        look_up = lambda table, ids: layer.fprop(NestedMap(table=table), ids)  # noqa: E731
        split = partition(look_up, mesh, "fsdp", layouts=["weights:VM", "BL"])
        self.assertAllEqual(split(theta.table, IDS), theta.table.numpy()[IDS])

    def test_token_embeddings_are_scaled_rows_of_the_table(self):
        layer, theta = make(TokenEmbedding, vocabulary_size=V)
        table = theta.table.numpy()
        expected = [[table[token] * math.sqrt(M) for token in row] for row in IDS]
        assert_close(layer.fprop(theta, tf.constant(IDS)), expected, "float32")

    def test_the_tied_softmax_is_the_product_with_the_table(self):
        layer, theta = make(TokenEmbedding, vocabulary_size=V)
        expected = X.astype(np.float64) @ theta.table.numpy().T
        assert_close(layer.logits(theta, tf.constant(X)), expected, "float32")

    def test_the_gradient_of_the_table_sums_over_occurrences_of_a_token(self):
        layer, theta = make(TokenEmbedding, vocabulary_size=V)
        with tf.GradientTape() as tape:
            tape.watch(theta.table)
            total = tf.reduce_sum(layer.fprop(theta, tf.constant(IDS)) * X)
        gradient = tf.convert_to_tensor(tape.gradient(total, theta.table))
        expected = np.zeros((V, M))
        np.add.at(expected, IDS, X * math.sqrt(M))
        assert_close(gradient, expected, "float32")

    def test_the_softmax_is_the_product_with_its_weight(self):
        layer, theta = make(Softmax, vocabulary_size=V)
        expected = X.astype(np.float64) @ theta.w.numpy()
        assert_close(layer.fprop(theta, tf.constant(X)), expected, "float32")


class PositionsTest(testing.TestCase, parameterized.TestCase):
    def test_sinusoids_match_the_formula(self):
        layer, theta = make(SinusoidalPositions, max_length=500)
        positions = np.array([[0, 1, 499], [7, 0, 1]], np.int32)
        actual = layer.fprop(theta, tf.constant(positions)).numpy()
        for row in range(2):
            for column in range(3):
                for i in range(M // 2):
                    angle = positions[row, column] / 10000 ** (2 * i / M)
                    self.assertAllClose(actual[row, column, i], math.sin(angle), rtol=0, atol=1e-6)
                    self.assertAllClose(
                        actual[row, column, M // 2 + i], math.cos(angle), rtol=0, atol=1e-6
                    )

    def test_sinusoids_as_in_fairseq(self):
        """Gives position 0 the number 2; the last timescale is 10000."""
        layer, theta = make(SinusoidalPositions, max_length=9, first_position=2, reaches_base=True)
        actual = layer.fprop(theta, tf.constant([[0, 5]])).numpy()
        for column, number in ((0, 2), (1, 7)):
            for i in range(M // 2):
                angle = number * math.exp(-i * math.log(10000) / (M // 2 - 1))
                self.assertAllClose(actual[0, column, i], math.sin(angle), rtol=0, atol=1e-6)
                self.assertAllClose(
                    actual[0, column, M // 2 + i], math.cos(angle), rtol=0, atol=1e-6
                )

    def test_learned_positions_are_rows_of_the_table(self):
        layer, theta = make(LearnedPositions, max_length=5)
        positions = np.array([[0, 1, 4]], np.int32)
        expected = theta.table.numpy()[positions]
        self.assertAllEqual(layer.fprop(theta, tf.constant(positions)), expected)

    def test_sinusoids_reject_an_odd_model_dim(self):
        with self.assertRaisesRegex(ValueError, "layer.model_dim: 5 is odd"):
            SinusoidalPositions.params().set(model_dim=5).instantiate(path="layer")

    @parameterized.parameters(SinusoidalPositions, LearnedPositions)
    def test_rejects_rows_longer_than_max_length(self, cls):
        layer, theta = make(cls, max_length=5)
        layer.fprop(theta, tf.zeros([1, 5], tf.int32))
        with self.assertRaisesRegex(
            ValueError, "layer.max_length: 5 is less than the row length, 6"
        ):
            layer.fprop(theta, tf.zeros([1, 6], tf.int32))


if __name__ == "__main__":
    testing.main()
