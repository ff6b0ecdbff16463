"""annotate without a mesh: the same tensor, but a checked layout."""

import pytest
import tensorflow as tf

from lingvo_gshard.sharding import annotate


def test_without_a_mesh_it_is_the_identity():
    x = tf.ones([2, 3])
    assert annotate(x, "BL") is x


def test_a_layout_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="'BLM' has 3 letters for a tensor of rank 2"):
        annotate(tf.ones([2, 3]), "BLM")


def test_an_unknown_letter_is_refused():
    with pytest.raises(ValueError, match="'BX': 'X' names no dimension"):
        annotate(tf.ones([2, 3]), "BX")
