"""Tests groups of tokens: splitting, joining, device order, and random numbers."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import random_numbers
from lingvo_gshard.layers.moe.groups import Groups, uniform
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning

B, L, M = 4, 12, 2
X = np.arange(1, B * L * M + 1, dtype=np.float32).reshape(B, L, M)


def test_the_last_group_is_padded():
    groups = Groups.for_batch(B, L, 5)
    assert (groups.count, groups.pieces) == (10, 1)
    cut = groups.split(tf.constant(X)).numpy()
    np.testing.assert_array_equal(cut.reshape(-1, M)[: B * L], X.reshape(-1, M))
    np.testing.assert_array_equal(cut.reshape(-1, M)[B * L :], 0)
    np.testing.assert_array_equal(groups.merge(tf.constant(cut)), X)
    assert Groups.for_batch(B, L, 100).size == B * L


@pytest.mark.parametrize("pieces", [2, 3, 6])
def test_pieces_permute_the_groups(pieces):
    whole, cut = Groups(B, L, 2), Groups(B, L, 2, pieces)
    found, expected = cut.split(tf.constant(X)).numpy(), whole.split(tf.constant(X)).numpy()
    order = [np.flatnonzero((expected == group).all((1, 2))).item() for group in found]
    assert sorted(order) == list(range(whole.count))
    # The first pieces of all rows come first.
    first = found[: whole.count // pieces].reshape(B, -1, M)
    np.testing.assert_array_equal(first, X[:, : L // pieces])
    np.testing.assert_array_equal(cut.merge(tf.constant(found)), X)
    key, shape = tf.constant([1, 2]), (whole.count, 2)
    with cut.ordered():
        of_pieces = uniform(shape, key).numpy()
    plain = random_numbers.hashed_uniform(shape, key).numpy()
    np.testing.assert_array_equal(of_pieces, plain[order])
    np.testing.assert_array_equal(uniform(shape, key), plain)


@pytest.mark.parametrize(
    ("mesh", "strategy", "size", "pieces", "cross"),
    [
        ("data=2,context=2", "expert_context", 3, 2, False),
        ("data=2,context=2", "expert_context", 4, 1, True),
        ("context=4", "context", 3, 4, False),
        ("data=2,model=2", "expert_sequence_tensor", 3, 1, False),
        ("data=2,context=2,model=2", "expert_context_sequence_tensor", 3, 2, False),
        ("data=4", "expert", 3, 1, False),
        # Rows do not divide.
        ("data=8,context=2", "expert_context", 3, 1, True),
        # Groups are not split like rows.
        ("data=2,context=2", "B->data; L->context; G->context", 3, 1, True),
    ],
)
def test_the_number_of_pieces_follows_the_sharding(mesh, strategy, size, pieces, cross):
    with use_partitioning(Partitioning.make(mesh, strategy)), tf.Graph().as_default():
        groups = Groups.for_batch(B, L, size)
        assert (groups.pieces, groups.cross_parts()) == (pieces, cross)
