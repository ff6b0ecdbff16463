# tests: core/faces.py, wings/inference/layers/faces.py, /docs/extending.md
"""Tests that one file adds a layer with a cache of its own: it trains, decodes and is planned."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core import Layer, NestedMap, UserError, context, initializers, layer_method
from lingvo_gshard.layers import AttentionMask, Reach, product
from lingvo_gshard.training import make_trainer
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import cache_shapes, extend, state_shapes
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS


class DecayingSum(Layer):
    """Each head adds up the values of its segment, which decay with their distance."""

    reach = Reach()

    @classmethod
    def params(cls):
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("num_heads", 0, "Size of N.")
        p.define("is_causal", False, "Set by the stack.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        p = self.p
        sizes = {"M": p.model_dim, "N": p.num_heads, "D": p.model_dim // p.num_heads}
        init = initializers.fan_in(p.model_dim)
        self.create_variable("w_value", "MND", sizes, init, inputs="M")
        self.create_variable("w_out", "NDM", sizes, init, inputs="ND")
        self.create_variable("decay", "N", sizes, initializers.normal(1.0))

    def mask(self, segments_BL):
        return AttentionMask(segments_BL, is_causal=True)

    @layer_method
    def fprop(self, theta, x_BLM, mask):
        return self.output(theta, self.sums(theta, self.values(theta, x_BLM), mask.segments_BL))

    @layer_method
    def values(self, theta, x_BLM):
        return product(self, theta, "w_value", "BLM,MND->BLND", x_BLM)

    @layer_method
    def sums(self, theta, value_BLND, segments_BL):
        index_L = tf.range(segments_BL.shape[1])
        distance_LK = index_L[:, None] - index_L[None, :]
        is_same_BLK = tf.equal(segments_BL[:, :, None], segments_BL[:, None, :])
        exponent_LK = tf.cast(tf.maximum(distance_LK, 0), tf.float32)
        factor_NLK = tf.sigmoid(theta.decay)[:, None, None] ** exponent_LK
        is_read_BLK = is_same_BLK & (distance_LK >= 0)
        factor_BNLK = tf.where(is_read_BLK[:, None], factor_NLK, 0.0)
        return tf.einsum("BNLK,BKND->BLND", factor_BNLK, value_BLND)

    @layer_method
    def output(self, theta, sum_BLND):
        return product(self, theta, "w_out", "BLND,NDM->BLM", sum_BLND)


@flops.register(DecayingSum)
def decaying_sum_flops(layer, shape):
    return 2 * shape.tokens * layer.p.model_dim * (2 * layer.p.model_dim + shape.length)


@cache_shapes.register(DecayingSum)
def decaying_sum_cache(layer, rows, slots):
    return {}


@state_shapes.register(DecayingSum)
def decaying_sum_states(layer, rows, positions):
    p = layer.p
    return {"sum": (rows, p.num_heads, p.model_dim // p.num_heads)}


@extend.register(DecayingSum)
def extend_decaying_sum(layer, theta, x_BLM, view, visible, cache=None):
    value_BLND = layer.values(theta, x_BLM)
    if cache is None:
        sum_BLND = layer.sums(theta, value_BLND, view.mask.segments_BL)
        return layer.output(theta, sum_BLND), NestedMap(sum=sum_BLND[:, -1])
    before_BND = tf.reshape(cache.sum, state_shapes(layer, x_BLM.shape[0], 1)["sum"])
    before_BND *= tf.cast(view.positions_BL > 0, tf.float32)[:, :, None]
    sum_BND = before_BND * tf.sigmoid(theta.decay)[:, None] + value_BLND[:, 0]
    return layer.output(theta, sum_BND[:, None]), NestedMap(
        sum=tf.reshape(sum_BND, cache.sum.shape)
    )


@pytest.fixture(scope="module")
def model():
    options = {"decoder__moe_every": 0, "decoder__layer__self_attention": DecayingSum.params()}
    return tiny_engine.language_model(**options)


def test_it_decodes_what_a_whole_pass_computes(model):
    """Texts of different lengths enter rows that earlier texts have left."""
    greedy = DecodingOptions(beam_size=1, most_tokens=6)
    prompts = [(BOS, 5, 7), (BOS,), (BOS, 4), (BOS, 3, 3, 9)]
    with model.engine(workers=1) as engine:
        for prompt in prompts:
            (found,) = engine.submit(Request((), prompt, greedy)).result()
            tokens, gains = tiny_engine.plain_greedy(model, [], prompt, 6)
            assert list(found.tokens) == [token for token in tokens if token != EOS]
            np.testing.assert_allclose(found.log_probabilities, gains, rtol=1e-3, atol=1e-4)


def test_all_of_its_weights_train(model):
    ids = tf.constant([[BOS, 5, 7, 3], [BOS, 4, 9, 8]])
    batch = {"target_inputs": ids, "target_labels": ids, "target_segments": tf.ones_like(ids)}
    batch["target_positions"] = tf.tile(tf.range(4)[None], [2, 1])
    with tf.GradientTape() as tape, context.scope(training=True, seed=tf.constant([1, 0])):
        tape.watch(model.theta.flatten())
        loss, _ = model.task.loss(model.theta, batch)
    paths = [path for path, _ in model.theta.flatten_items()]
    gradients = dict(zip(paths, tape.gradient(loss, model.theta.flatten()), strict=True))
    own = [path for path in paths if ".self_attention." in path]
    assert len(own) == 6 and all(np.abs(gradients[path]).max() > 0 for path in own)


def test_its_operations_are_planned():
    settings = ["task.decoder.moe_every = 0", "task.tie_softmax = False"]
    settings += [f"task.decoder.layer.self_attention = @{__name__}.DecayingSum"]
    params = experiment("language_model.quickstart", settings)
    task = make_trainer(params).task
    size, vocabulary, hidden = task.p.model_dim, task.p.vocabulary_size, task.decoder.p.hidden_dim
    rows, length = params.input.batch_rows, params.input.length
    layer = 2 * size * size + size * length + 3 * size * hidden
    forward = 2 * rows * length * (task.decoder.p.num_layers * layer + size * vocabulary)
    assert lingvo_gshard.plan(params, "cpu:2").flops.useful == 3 * forward // 2


def test_its_weights_get_adapters():
    attention = DecayingSum.params()
    params = tiny_engine.language_model(
        decoder__layer__self_attention=attention, lora__rank=2, lora__weights=("*.w_value",)
    ).task.p
    found = dict(params.instantiate().variable_specs().flatten_items())
    adapted = [path for path in found if path.endswith("w_value_a")]
    assert len(adapted) == params.decoder.num_layers and found[adapted[0]].shape == (8, 2)


def test_a_method_in_place_of_a_function_is_named():
    class Old(DecayingSum):
        def extend(self, theta, x_BLM, view, visible, cache=None):
            return x_BLM, cache

    layer = Old.params().set(model_dim=4, num_heads=2).instantiate(path="old")
    with pytest.raises(UserError, match=r"Old\.extend is a method.*@extend\.register\(Old\)"):
        extend(layer, layer.init(1), tf.zeros([1, 1, 4]), None, None)
