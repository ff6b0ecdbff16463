"""Tests the verification of functions that `partition` takes."""

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.sharding import annotate, annotate_weights, einsum
from lingvo_gshard.sharding.manual import manual

MESH, STRATEGY = "data=2,model=2", "B->data; H->model"
X = np.random.default_rng(0).normal(size=(4, 3, 6)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32)


def product(x_BLM, w_MH):
    return {"y": einsum("BLM,MH->BLH", annotate(x_BLM, "BLM"), w_MH), "none": None}


def test_a_function_is_equal():
    found = lingvo_gshard.verify(product, [X, W], mesh=MESH, strategy=STRATEGY)
    assert found.is_equal and found.subject == "product", found.lines()
    assert [(each.kind, each.name) for each in found.compared] == [("result", "result[0]")]


def test_a_function_without_its_sum_is_not_equal():
    def squares(x_BLM):
        return manual(lambda x: tf.reduce_sum(x * x)[None], ["BLM"], ((),))(x_BLM)

    found = lingvo_gshard.verify(squares, [X], mesh=MESH, strategy=STRATEGY)
    assert found.first.name == "result[0]" and found.first.difference.unequal_copies == ("data",)
    assert "a sum over data (psum) is missing" in "\n".join(found.lines())


def test_layers_of_a_function_are_compared():
    layer = FeedForward.params().set(model_dim=6, hidden_dim=8).instantiate(path="dense")

    def loss(theta, x_BLM):
        theta = annotate_weights(theta, layer.variable_specs())
        return tf.reduce_sum(layer.fprop(theta, annotate(x_BLM, "BLM"), tf.ones([4, 3], tf.int32)))

    theta = layer.init(1).transform(lambda weight: weight.numpy())
    found = lingvo_gshard.verify(loss, [theta, X], mesh=MESH, strategy=STRATEGY)
    assert found.is_equal, found.lines()
    assert [each.name for each in found.compared] == ["dense", "result[0]"]


def test_a_wrong_axis_is_named():
    with pytest.raises(ValueError, match="Did you mean .model"):
        lingvo_gshard.verify(product, [X, W], mesh=MESH, strategy="H->modle")
