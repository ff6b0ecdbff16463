"""Compares measured expert use with counts by hand, with and without loops."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.wings.fine_tuning.surgery import expert_use
from lingvo_gshard.wings.published_layers.routers import ExpertChoiceRouter
from tests.fine_tuning.surgery import tiny_stacks
from tests.layers.stacks import executions

TOKENS = tiny_stacks.ROWS * 7
LAYERS = ["encoder.layers[1].feed_forward", "decoder.layers[1].feed_forward"]


def measured(indices=(0,), **moe):
    trainer = tiny_stacks.trainer(tiny_stacks.sparse(**moe))
    theta = unflatten(trainer.theta_specs, tiny_stacks.arrays(trainer)[0], "weights")
    batches = [tiny_stacks.batch(index) for index in indices]
    return expert_use.measure(trainer.task, theta, batches)


def test_every_token_goes_to_two_experts():
    use = measured()
    assert list(use) == LAYERS
    for found in use.values():
        assert found.load.sum() == 2 * TOKENS == 2 * found.tokens
        np.testing.assert_allclose(found.gate.sum(), TOKENS, rtol=1e-5)
        assert found.dropped_share == 0
        assert found.largest_violation == pytest.approx(found.load.max() / found.load.mean() - 1)
        assert found.dead_experts == np.sum(found.load == 0)
        assert 0 < found.router_entropy < np.log(tiny_stacks.EXPERTS)


def test_use_of_several_batches_is_their_sum():
    both, one, other = measured((0, 1)), measured((0,)), measured((1,))
    for layer in LAYERS:
        total = one[layer] + other[layer]
        np.testing.assert_array_equal(both[layer].load, total.load)
        assert both[layer].router_entropy == total.router_entropy
        assert total.utilization == total.load.sum() / (2 * one[layer].slots)


def test_layer_use_matches_hand_counts():
    params = MixtureOfExperts.params().set(model_dim=4, hidden_dim=6, num_experts=3, group_size=5)
    params.router.capacity_factor = 0.75
    layer = params.instantiate(path="moe")
    x = np.random.default_rng(2).normal(size=(2, 6, 4)).astype(np.float32)
    mask = np.ones((2, 6), np.int32)
    mask[1, 4:] = 0
    seen = observed(layer, x, mask)
    # Three groups of five of the twelve tokens, of which ten are real; 5 * 0.75 * 2 / 3 places.
    load, gates = count(layer, x, mask, capacity=2)
    np.testing.assert_array_equal(seen["moe/load"], load)
    np.testing.assert_allclose(seen["moe/gate"], gates, rtol=1e-5)
    assert seen["moe/tokens"] == 10 and seen["moe/slots"] == 3 * 3 * 2


def observed(layer, x, mask):
    seen = {}
    with context.scope(on_output=lambda path, value: seen.__setitem__(path, value.numpy())):
        layer.fprop(layer.init(1), tf.constant(x), tf.constant(mask))
    return seen


def count(layer, x, mask, capacity):
    """Counts load and gates by expert, token by token, in order of choice within a group."""
    w_gate = layer.init(1).router.w_gate.numpy().astype(np.float64)
    load, gates = np.zeros(3), np.zeros(3)
    tokens = np.pad(x.reshape(-1, 4), [[0, 3], [0, 0]]).reshape(3, 5, 4)
    real = np.pad(mask.reshape(-1), [0, 3]).reshape(3, 5)
    for group, is_real in zip(tokens, real, strict=True):
        probabilities = np.exp(group @ w_gate)
        probabilities /= probabilities.sum(-1, keepdims=True)
        order = np.argsort(-probabilities, -1)[:, :2]
        taken = np.zeros(3, int)
        for choice in range(2):
            for token in np.flatnonzero(is_real):
                expert = order[token, choice]
                both = probabilities[token, order[token]]
                if taken[expert] < capacity:
                    load[expert] += 1
                    gates[expert] += both[choice] / both.sum()
                taken[expert] += 1
    return load, gates


def test_expert_choice_reports_its_use():
    params = MixtureOfExperts.params().set(model_dim=4, hidden_dim=6, num_experts=3, group_size=6)
    params.router = ExpertChoiceRouter.params().set(capacity_factor=1.0)
    x = np.random.default_rng(2).normal(size=(2, 6, 4)).astype(np.float32)
    seen = observed(params.instantiate(path="moe"), x, np.ones((2, 6), np.int32))
    np.testing.assert_array_equal(seen["moe/load"], [4, 4, 4])
    assert np.all((0 < seen["moe/gate"]) & (seen["moe/gate"] < 4))
    assert seen["moe/tokens"] == 12 and seen["moe/slots"] == 12


def test_use_is_not_computed_unless_requested(monkeypatch):
    layer = MixtureOfExperts.params()
    layer.set(model_dim=4, hidden_dim=6, num_experts=3).router.capacity_factor = 1.0
    layer = layer.instantiate(path="moe")
    x = tf.ones([1, 4, 4])
    asked = []

    def ask():
        asked.append(True)
        return tf.zeros([])

    layer.observe_named("more", ask)
    layer.fprop(layer.init(1), x, tf.ones([1, 4]))
    assert not asked


def test_loop_layers_are_reported_by_their_own_names():
    plain, loop = (tiny_stacks.sparse() for _ in range(2))
    for params, execution in ((plain, executions.sequential()), (loop, executions.loop())):
        for stack in (params.encoder, params.decoder):
            stack.set(num_layers=4, execution=execution)
    plain, loop = map(tiny_stacks.trainer, (plain, loop))
    batches = [tiny_stacks.batch()]
    expected, found = (
        expert_use.measure(trainer.task, trainer.task.init(5), batches) for trainer in (plain, loop)
    )
    names = [f"{side}.layers[{i}].feed_forward" for side in ("encoder", "decoder") for i in (1, 3)]
    assert list(expected) == list(found) == names
    for name in names:
        np.testing.assert_array_equal(expected[name].load, found[name].load)
        np.testing.assert_allclose(expected[name].gate, found[name].gate, rtol=1e-5)


def test_model_without_experts_reports_no_use():
    trainer = tiny_stacks.trainer(tiny_stacks.dense())
    theta: NestedMap = trainer.task.init(1)
    assert expert_use.measure(trainer.task, theta, [tiny_stacks.batch()]) == {}
