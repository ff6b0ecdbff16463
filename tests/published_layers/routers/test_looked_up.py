"""Compares routers of DeepSeek-V4 with their formulas."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.wings.published_layers.routers.looked_up import LookupRouter, SoftplusRouter

E, K, V = 6, 2, 10
LOGITS = np.random.default_rng(4).normal(size=(2, 9, E)).astype(np.float32)
IDS = np.random.default_rng(5).integers(0, V, (2, 9)).astype(np.int32)
SCORES = np.sqrt(np.log1p(np.exp(LOGITS.astype(np.float64))))


def make(cls, **values):
    sizes = {"model_dim": E, "num_experts": E, "k": K, "evaluation_capacity_factor": float(E)}
    p = cls.params().set(scale=1.5, **sizes, **values)
    return p.instantiate(path="router")


def check(routing, experts):
    """Checks the experts [G,S,k], and that gates are scores divided by their sum, times 1.5."""
    gates = np.take_along_axis(SCORES, experts, -1)
    gates *= 1.5 / gates.sum(-1, keepdims=True)
    for index, choice in enumerate(routing.assignments):
        np.testing.assert_array_equal(choice.expert_GS, experts[..., index])
        np.testing.assert_allclose(choice.gate_GS, gates[..., index], rtol=1e-5)


def test_the_largest_scores_with_the_bias_choose():
    bias = np.linspace(-0.5, 0.5, E)
    theta = NestedMap(w_gate=tf.eye(E), selection_bias=tf.constant(bias, tf.float32))
    routing = make(SoftplusRouter).fprop(theta, tf.constant(LOGITS), tf.ones([2, 9]))
    check(routing, np.argsort(-(SCORES + bias), -1)[..., :K])


def test_a_table_chooses():
    table = np.random.default_rng(6).permuted(np.tile(np.arange(E), (V, 1)), axis=1)[:, :K]
    theta = NestedMap(w_gate=tf.eye(E), experts_of_ids=tf.constant(table, tf.float32))
    layer = make(LookupRouter, vocabulary_size=V)
    routing = layer.fprop(theta, tf.constant(LOGITS), tf.ones([2, 9]), tf.constant(IDS))
    check(routing, table[IDS])
    with pytest.raises(UserError, match="routes by token ids, but none were given"):
        layer.fprop(theta, tf.constant(LOGITS), tf.ones([2, 9]))


def test_a_new_table_loads_experts_evenly_and_is_not_trained():
    layer = make(LookupRouter, vocabulary_size=V * E)
    table = layer.init(1).experts_of_ids.numpy()
    assert np.bincount(table.astype(int).ravel()).tolist() == [V * K] * E
    assert all(len(set(row)) == K for row in table)
    (spec,) = (s for s in layer.variable_specs().flatten() if s.path.endswith("experts_of_ids"))
    assert spec.is_frozen and spec.dtype == "float32"
    with pytest.raises(UserError, match="use_selection_bias: True"):
        make(LookupRouter, vocabulary_size=V, use_selection_bias=True)
