"""Tests groups of tokens: splitting, joining, device order, and random numbers."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import random_numbers
from lingvo_gshard.layers.moe.groups import Groups, uniform
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning

B, L, M = 4, 12, 2
X = np.arange(1, B * L * M + 1, dtype=np.float32).reshape(B, L, M)


class GroupsTest(testing.TestCase, parameterized.TestCase):
    def test_the_last_group_is_padded(self):
        groups = Groups.for_batch(B, L, 5)
        self.assertEqual((groups.count, groups.pieces), (10, 1))
        cut = groups.split(tf.constant(X)).numpy()
        self.assertAllEqual(cut.reshape(-1, M)[: B * L], X.reshape(-1, M))
        self.assertFalse(np.any(cut.reshape(-1, M)[B * L :]))
        self.assertAllEqual(groups.merge(tf.constant(cut)), X)
        self.assertEqual(Groups.for_batch(B, L, 100).size, B * L)

    @parameterized.parameters(2, 3, 6)
    def test_pieces_permute_the_groups(self, pieces):
        whole, cut = Groups(B, L, 2), Groups(B, L, 2, pieces)
        found, expected = cut.split(tf.constant(X)).numpy(), whole.split(tf.constant(X)).numpy()
        order = [np.flatnonzero((expected == group).all((1, 2))).item() for group in found]
        self.assertEqual(sorted(order), list(range(whole.count)))
        # The first pieces of all rows come first.
        first = found[: whole.count // pieces].reshape(B, -1, M)
        self.assertAllEqual(first, X[:, : L // pieces])
        self.assertAllEqual(cut.merge(tf.constant(found)), X)
        key, shape = tf.constant([1, 2]), (whole.count, 2)
        with cut.ordered():
            of_pieces = uniform(shape, key).numpy()
        plain = random_numbers.hashed_uniform(shape, key).numpy()
        self.assertAllEqual(of_pieces, plain[order])
        self.assertAllEqual(uniform(shape, key), plain)

    @parameterized.parameters(
        ("data=2,context=2", "expert_context", 3, 2, False),
        ("data=2,context=2", "expert_context", 4, 1, True),
        ("context=4", "context", 3, 4, False),
        ("data=2,model=2", "expert_sequence_tensor", 3, 1, False),
        ("data=2,context=2,model=2", "expert_context_sequence_tensor", 3, 2, False),
        ("data=4", "expert", 3, 1, False),
        ("data=8,context=2", "expert_context", 3, 1, True),
        ("data=2,context=2", "B->data; L->context; G->context", 3, 1, True),
    )
    def test_the_number_of_pieces_follows_the_sharding(self, mesh, strategy, size, pieces, cross):
        with use_partitioning(Partitioning.make(mesh, strategy)), tf.Graph().as_default():
            groups = Groups.for_batch(B, L, size)
            self.assertEqual((groups.pieces, groups.cross_parts()), (pieces, cross))


if __name__ == "__main__":
    testing.main()
