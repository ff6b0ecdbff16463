"""Compares NestedMap with tf.nest, tf.function and plain dictionaries."""

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies

from lingvo_gshard.core.nested_map import NestedMap


def _tree():
    return NestedMap(b=NestedMap(y=1, x=2), a=[NestedMap(w=3), NestedMap(w=4)], c=5)


def test_keys_are_attributes():
    tree = _tree()
    tree.d = 6
    del tree.c
    assert tree["d"] == 6 and tree.b.x == 2 and tree.a[1].w == 4 and "c" not in tree


def test_a_missing_key_suggests_the_nearest():
    with pytest.raises(AttributeError, match="No key 'weigth'. Did you mean 'weight'"):
        _ = NestedMap(weight=1).weigth
    with pytest.raises(AttributeError, match="No key 'weigth'"):
        del NestedMap(weight=1).weigth


def test_flatten_items_returns_sorted_paths():
    assert _tree().flatten_items() == [
        ("a[0].w", 3),
        ("a[1].w", 4),
        ("b.x", 2),
        ("b.y", 1),
        ("c", 5),
    ]


def test_transform_with_path_visits_each_leaf_once():
    named = _tree().transform_with_path(lambda path, leaf: f"{path}={leaf}")
    assert named.flatten() == ["a[0].w=3", "a[1].w=4", "b.x=2", "b.y=1", "c=5"]
    assert isinstance(named.a[0], NestedMap)
    assert list(named) == ["b", "a", "c"]


@pytest.mark.parametrize("count", [4, 6])
def test_pack_rejects_the_wrong_number_of_leaves(count):
    with pytest.raises(ValueError, match=f"{count} leaves given for a structure of 5"):
        _tree().pack(range(count))


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


@hypothesis.given(strategies.dictionaries(strategies.sampled_from("abcd"), _trees, max_size=3))
def test_leaf_order_equals_that_of_tf_nest(values):
    tree = NestedMap(values)
    assert tree.flatten() == tf.nest.flatten(tree)
    assert tree.pack(tree.flatten()) == tree
    added = tf.nest.map_structure(lambda leaf: leaf + 1, tree)
    assert isinstance(added, NestedMap) and added == tree.transform(lambda leaf: leaf + 1)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_tf_function_accepts_and_returns_nested_maps(jit_compile):
    @tf.function(jit_compile=jit_compile)
    def function(tree):
        assert isinstance(tree, NestedMap) and isinstance(tree.a[0], NestedMap)
        return NestedMap(total=tree.a[0].w + tree.b.x, b=tree.b)

    result = function(_tree().transform(tf.constant))
    assert isinstance(result, NestedMap) and isinstance(result.b, NestedMap)
    assert int(result.total) == 5 and int(result.b.y) == 1
