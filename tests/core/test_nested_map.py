"""Compares NestedMap with tf.nest, tf.function and plain dictionaries."""

import hypothesis
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap


def _tree():
    return NestedMap(b=NestedMap(y=1, x=2), a=[NestedMap(w=3), NestedMap(w=4)], c=5)


_trees = strategies.recursive(
    strategies.integers(),
    lambda children: strategies.one_of(
        strategies.dictionaries(strategies.sampled_from("abcd"), children, max_size=3).map(
            NestedMap
        ),
        strategies.lists(children, max_size=3),
    ),
    max_leaves=10,
)


class NestedMapTest(testing.TestCase, parameterized.TestCase):
    def test_keys_are_attributes(self):
        tree = _tree()
        tree.d = 6
        del tree.c
        self.assertEqual(tree["d"], 6)
        self.assertEqual(tree.b.x, 2)
        self.assertEqual(tree.a[1].w, 4)
        self.assertNotIn("c", tree)

    def test_a_missing_key_suggests_the_nearest(self):
        with self.assertRaisesRegex(AttributeError, "No key 'weigth'. Did you mean 'weight'"):
            _ = NestedMap(weight=1).weigth
        with self.assertRaisesRegex(AttributeError, "No key 'weigth'"):
            del NestedMap(weight=1).weigth

    def test_flatten_items_returns_sorted_paths(self):
        self.assertEqual(
            _tree().flatten_items(),
            [
                ("a[0].w", 3),
                ("a[1].w", 4),
                ("b.x", 2),
                ("b.y", 1),
                ("c", 5),
            ],
        )

    def test_transform_with_path_visits_each_leaf_once(self):
        named = _tree().transform_with_path(lambda path, leaf: f"{path}={leaf}")
        self.assertEqual(named.flatten(), ["a[0].w=3", "a[1].w=4", "b.x=2", "b.y=1", "c=5"])
        self.assertIsInstance(named.a[0], NestedMap)
        self.assertEqual(list(named), ["b", "a", "c"])

    @parameterized.parameters(4, 6)
    def test_pack_rejects_the_wrong_number_of_leaves(self, count):
        with self.assertRaisesRegex(ValueError, f"{count} leaves given for a structure of 5"):
            _tree().pack(range(count))

    @hypothesis.settings(deadline=None)
    @hypothesis.given(strategies.dictionaries(strategies.sampled_from("abcd"), _trees, max_size=3))
    def test_leaf_order_equals_that_of_tf_nest(self, values):
        tree = NestedMap(values)
        self.assertEqual(tree.flatten(), tf.nest.flatten(tree))
        self.assertEqual(tree.pack(tree.flatten()), tree)
        added = tf.nest.map_structure(lambda leaf: leaf + 1, tree)
        self.assertIsInstance(added, NestedMap)
        self.assertEqual(added, tree.transform(lambda leaf: leaf + 1))

    @parameterized.parameters(False, True)
    def test_tf_function_accepts_and_returns_nested_maps(self, jit_compile):
        @tf.function(jit_compile=jit_compile)
        def function(tree):
            self.assertIsInstance(tree, NestedMap)
            self.assertIsInstance(tree.a[0], NestedMap)
            return NestedMap(total=tree.a[0].w + tree.b.x, b=tree.b)

        result = function(_tree().transform(tf.constant))
        self.assertIsInstance(result, NestedMap)
        self.assertIsInstance(result.b, NestedMap)
        self.assertEqual(int(result.total), 5)
        self.assertEqual(int(result.b.y), 1)


if __name__ == "__main__":
    testing.main()
