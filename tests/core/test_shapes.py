"""Static shapes of tensors."""

import pytest
import tensorflow as tf

from lingvo_gshard.core.shapes import known_sizes


def test_known_sizes():
    assert known_sizes(tf.TensorShape([2, 3])) == [2, 3]
    assert known_sizes(tf.TensorShape([])) == []


@pytest.mark.parametrize("shape", [[2, None], None])
def test_rejects_unknown_sizes(shape):
    with pytest.raises(ValueError, match="unknown"):
        known_sizes(tf.TensorShape(shape))
