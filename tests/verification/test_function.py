# tests: wings/verification/function.py, wings/verification/findings.py
# tests: wings/verification/causes.py, wings/verification/operations.py
"""Tests the verification of functions that `partition` takes."""

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.sharding import annotate, annotate_weights, einsum
from lingvo_gshard.sharding.collectives import psum
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


def test_the_line_of_a_result_is_named():
    def rows(x_BLM):
        return manual(lambda x: tf.reduce_sum(x)[None], ["BLM"], ((),))(x_BLM)

    found = lingvo_gshard.verify(rows, [X], mesh=MESH, strategy=STRATEGY).first
    line = rows.__code__.co_firstlineno + 1
    assert found.source == found.annotation.source == f"test_function.py:{line}"
    assert f"computed at test_function.py:{line}" in "\n".join(found.lines())


@pytest.mark.parametrize("axis", ["data", "model"])
def test_axes_of_one_size_are_told_apart(axis):
    def sums(x_BLM):
        return manual(lambda x: psum(tf.ones([1]), axis), ["BLM"], ((),))(x_BLM)

    found = lingvo_gshard.verify(sums, [X], mesh=MESH, strategy=STRATEGY).first
    assert found.axes == ((axis,),)
    assert f"summed twice, over {axis} (2 devices)" in found.likely


def test_random_numbers_without_a_key_are_named():
    def hidden_generator(x_BLM):
        return annotate(x_BLM * tf.random.normal(x_BLM.shape), "BLM")

    def seed_in_region(x_BLM):
        def on_device(x):
            return x * tf.random.stateless_uniform(x.shape, [1, 2])

        return manual(on_device, ["BLM"], "BLM")(x_BLM)

    found = lingvo_gshard.verify(hidden_generator, [X], mesh=MESH, strategy=STRATEGY).first
    line = hidden_generator.__code__.co_firstlineno + 1
    assert f"RandomStandardNormal at test_function.py:{line} draws from a gen" in found.likely
    found = lingvo_gshard.verify(seed_in_region, [X], mesh=MESH, strategy=STRATEGY).first
    line = seed_in_region.__code__.co_firstlineno + 2
    assert f"StatelessRandomUniformV2 at test_function.py:{line} draws from a f" in found.likely


def test_a_fixed_seed_outside_of_regions_is_equal():
    def noisy(x_BLM):
        return annotate(x_BLM * tf.random.stateless_uniform(x_BLM.shape, [1, 2]), "BLM")

    found = lingvo_gshard.verify(noisy, [X], mesh=MESH, strategy=STRATEGY)
    assert found.is_equal, found.lines()


def test_constants_are_not_folded_in_float32():
    table = np.random.default_rng(2).normal(size=6).astype(np.float32)

    def scaled(x_BLM):
        table_H = annotate(tf.constant(table), "H") / 3.0
        position_L = annotate(tf.cast(tf.range(3), tf.float32), "L")
        scale_H = annotate(tf.range(6, dtype=tf.float32), "H")
        return x_BLM * tf.exp(table_H) * tf.sin(position_L)[:, None] / (scale_H + 7.0)

    found = lingvo_gshard.verify(scaled, [X], mesh=MESH, strategy=STRATEGY)
    assert found.is_equal and found.largest.difference.relative < 1e-14, found.lines()


def test_a_constant_from_outside_of_a_region_is_not_refused():
    def shifted(x_BLM):
        one = tf.constant(1.5)
        return manual(lambda x: x + one, ["BLM"], "BLM")(x_BLM) * one

    assert lingvo_gshard.verify(shifted, [X], mesh=MESH, strategy=STRATEGY).is_equal


def test_a_result_whose_shape_depends_on_the_mesh_differs():
    def parts(x_BLM):
        return manual(lambda x: tf.reduce_sum(x)[None], ["BLM"], "B")(x_BLM)

    found = lingvo_gshard.verify(parts, [X], mesh=MESH, strategy=STRATEGY)
    text = "\n".join(found.lines())
    assert "result[0]: its shape is [2] partitioned, and [1] whole" in text
    assert "its shape depends on the number of devices" in found.first.likely


class Parts(Layer):
    @layer_method
    def fprop(self, theta, x_BLM):
        return manual(lambda x: tf.reduce_sum(x)[None], ["BLM"], "B")(x_BLM)


def test_a_layer_whose_shape_depends_on_the_mesh_is_noted():
    layer = Parts.params().instantiate(path="parts")

    def total(x_BLM):
        return tf.reduce_sum(layer.fprop(layer.init(1), x_BLM))

    found = lingvo_gshard.verify(total, [X], mesh=MESH, strategy=STRATEGY)
    assert found.is_equal, found.lines()
    assert "not compared: the output parts is [2] over the mesh and [1] on one" in found.notes[0]


def test_a_wrong_axis_is_named():
    with pytest.raises(ValueError, match="Did you mean .model"):
        lingvo_gshard.verify(product, [X, W], mesh=MESH, strategy="H->modle")
