# tests: wings/verification/observation.py
"""Tests that groups of tokens are compared by their numbers, not by where a mesh stores them."""

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.layers.moe.layer import MixtureOfExperts
from lingvo_gshard.sharding import annotate
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.run.options import RunOptions
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.verification.observation import Observed, _digest
from tests.tiny import CLASSES, INPUTS, TinyInput

MESH, STRATEGY = "data=2,context=2", "expert_context"
ROWS, LENGTH = 4, 8


class ExpertsTask(Task):
    """One mixture of experts with random second experts and dropout in the experts."""

    def __init__(self, params, path=""):
        super().__init__(params, path)
        layer = MixtureOfExperts.params().set(
            model_dim=INPUTS, hidden_dim=8, num_experts=4, group_size=4
        )
        layer.experts.dropout_rate = 0.3
        self.create_child("experts", layer)

    def id_ranges(self):
        return {"y": CLASSES}

    @layer_method
    def loss(self, theta, batch):
        x_BLM = annotate(tf.reshape(batch["x"], [ROWS, LENGTH, INPUTS]), "BLM")
        y_BLM = self.experts.fprop(theta.experts, x_BLM, tf.ones([ROWS, LENGTH], tf.int32))
        loss = tf.reduce_mean(tf.square(y_BLM - 1.0)) + self.layer_losses()
        return loss, NestedMap(cross_entropy=(loss, tf.constant(1.0)))


def verify():
    params = Experiment.params().set(
        name="test.experts",
        task=ExpertsTask.params(),
        input=TinyInput.params().set(rows=ROWS * LENGTH),
        step=Trainer.params().set(
            optimizer=Adam.params(),
        ),
        run=RunOptions.params().set(
            steps=10,
        ),
    )
    return lingvo_gshard.verify(params, mesh=MESH, strategy=STRATEGY)


@pytest.mark.slow
def test_groups_in_another_order_are_equal():
    found = verify()
    assert found.is_equal and found.largest.difference.relative < 1e-12, found.lines()
    outputs = {row.name for row in found.compared if row.kind == "output"}
    assert {"experts.router/logits", "experts.experts", "experts"} <= outputs


@pytest.mark.slow
def test_groups_in_an_order_that_is_not_declared_are_a_difference(monkeypatch):
    numbers = Groups._numbers
    monkeypatch.setattr(Groups, "_numbers", lambda self: numbers(self)[::-1].copy())
    found = verify()
    assert found.first.name == "experts.router/logits", found.lines()


def test_values_and_digests_follow_the_numbers_of_groups():
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(3, 4, 2)).astype(np.float32)
    order = token_context.GroupOrder(np.array([2, 0, 3, 1]), dimension=1)
    stored = whole[:, order.numbers]
    mine, its = (Observed("x", "x", (0, 0, 0), None, groups) for groups in (order, None))
    np.testing.assert_array_equal(mine.like(its, whole), stored)
    np.testing.assert_array_equal(its.like(mine, stored), whole)
    digests = [_digest(tf.constant(stored), order), _digest(tf.constant(whole), None)]
    np.testing.assert_allclose(*digests, rtol=1e-5)
    wrong = _digest(tf.constant(stored[:, ::-1]), order)
    assert np.abs(np.subtract(wrong, digests[1]))[:3].max() > 0.1
