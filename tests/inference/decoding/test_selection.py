"""Compares the choice of the largest numbers with NumPy's."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.wings.inference.decoding import selection


@pytest.mark.parametrize(("size", "count"), [(7, 3), (64, 1), (1000, 4), (4000, 8), (997, 5)])
def test_top_few_are_the_largest_in_order(size, count):
    x = np.random.default_rng(size).normal(size=(5, size)).astype(np.float32)
    values, indices = selection.top_few(tf.constant(x), count)
    expected = np.argsort(-x, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


@pytest.mark.parametrize("size", [7, 1000, 997])
@pytest.mark.parametrize("without", [(0,), (5,), (1, 2), (0, 3, 5), (2, 6, -1)], ids=str)
def test_indices_are_left_out(size, without):
    x = np.random.default_rng(size).normal(size=(5, size)).astype(np.float32)
    without = tuple(index % size for index in without)
    # The largest of all, in some rows with an equal one beside it.
    x[:, without] = 9.0
    x[::2, 4] = 9.0
    values, indices = selection.top_few(tf.constant(x), 3, without)
    x[:, without] = -np.inf
    expected = np.argsort(-x, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 1))


def test_equal_numbers_keep_their_order():
    x = np.zeros((2, 300), np.float32)
    x[1, 250] = 1.0
    np.testing.assert_array_equal(selection.top_few(tf.constant(x), 1)[1], [[0], [250]])
    np.testing.assert_array_equal(selection.top_few(tf.constant(x), 2)[1], [[0, 1], [250, 0]])


@pytest.mark.parametrize("size", [9, 997])
def test_indices_of_a_row_without_numbers_are_valid(size):
    _, indices = selection.top_few(tf.fill([1, size], float("nan")), 2)
    assert (indices.numpy() < size).all()
