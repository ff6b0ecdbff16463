"""Tests which experts pruning keeps, and that their outputs do not change."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.wings.fine_tuning.surgery import expert_use, pruning
from lingvo_gshard.wings.fine_tuning.surgery.expert_use import ExpertUse
from lingvo_gshard.wings.published_layers.routers import HashRouter
from tests.fine_tuning.surgery import tiny_stacks
from tests.layers.stacks.executions import loop

LAYER = "encoder.layers[1].feed_forward"


def pruned(keep, **stack):
    """Returns both trainers, the original weights, the pruned state, and the kept experts."""
    params = tiny_stacks.sparse()
    for each in (params.encoder, params.decoder):
        each.set(**stack)
    task = pruning.pruned_task(params, keep)
    whole, fewer = tiny_stacks.trainer(params), tiny_stacks.trainer(task)
    theta, moments = tiny_stacks.arrays(whole)
    weights = unflatten(whole.theta_specs, theta, "weights")
    use = expert_use.measure(whole.task, weights, [tiny_stacks.batch()])
    kept = pruning.chosen(task, use)
    state = pruning.pruned_state(whole, fewer, theta, moments, kept)
    return whole, fewer, weights, state, kept


@pytest.mark.parametrize(
    "stack", [{}, {"num_layers": 4, "execution": loop()}], ids=["layers", "loop"]
)
def test_keeping_all_experts_changes_nothing(stack):
    whole, fewer, weights, state, kept = pruned(1.0, **stack)
    assert all(list(experts) == [0, 1, 2, 3] for experts in kept.values())
    np.testing.assert_array_equal(
        tiny_stacks.logits(fewer, state.theta), tiny_stacks.logits(whole, weights)
    )


def test_tokens_whose_experts_are_all_kept_have_the_same_output():
    whole, fewer, weights, state, kept = pruned(0.75)
    experts = kept[LAYER]
    assert len(experts) == 3
    x = np.random.default_rng(4).normal(size=(1, 40, 8)).astype(np.float32)
    gate = weights.encoder.layers[1].feed_forward.router.w_gate
    choices = np.argsort(-(x[0] @ gate), -1)[:, :2]
    all_left = np.isin(choices, experts).all(-1)
    assert 5 < all_left.sum() < 35
    before, after = (
        layer_output(trainer, theta, x)
        for trainer, theta in ((whole, weights), (fewer, state.theta))
    )
    assert_close(after[all_left], before[all_left], "order")
    assert np.abs(after - before)[~all_left].max(-1).min() > 1e-3


def layer_output(trainer, theta, x):
    layer = trainer.task.encoder.layers[1].feed_forward
    theta = theta.encoder.layers[1].feed_forward.transform(tf.convert_to_tensor)
    with context.scope():
        return layer.fprop(theta, tf.constant(x), tf.ones(x.shape[:2])).numpy()[0]


@pytest.mark.parametrize(
    "stack", [{}, {"num_layers": 4, "execution": loop()}], ids=["layers", "loop"]
)
def test_weights_and_moments_are_those_of_the_kept_experts(stack):
    whole, fewer, weights, state, kept = pruned(0.5, **stack)
    assert fewer.task.encoder.p.moe.num_experts == 2
    specs = fewer.state_specs()
    for item in ("theta", "moments"):
        pairs = zip(state[item].flatten_items(), specs[item].flatten(), strict=True)
        assert all(array.shape == spec.shape for (_, array), spec in pairs)
    _, moments = tiny_stacks.arrays(whole)
    if stack:
        path, at = "encoder.layers.body[1].feed_forward", 1
        experts = kept["encoder.layers[3].feed_forward"]
        pick, take = (lambda array: array[at]), (lambda array, axis: array.take(experts, axis))
    else:
        path, experts = LAYER, kept[LAYER]
        pick, take = (lambda array: array), (lambda array, axis: array.take(experts, axis))
    left, before = (dict(theta.flatten_items()) for theta in (state.theta, weights))
    new_moments = dict(state.moments.flatten_items())
    for name, axis in (("experts.w_in", 0), ("router.w_gate", 1)):
        expected = take(pick(before[f"{path}.{name}"]), axis)
        np.testing.assert_array_equal(pick(left[f"{path}.{name}"]), expected)
        expected = take(pick(moments[f"{path}.{name}.first_moment"]), axis)
        np.testing.assert_array_equal(pick(new_moments[f"{path}.{name}.first_moment"]), expected)


def use(load, gate):
    load, gate = np.array(load, float), np.array(gate, float)
    return ExpertUse(load, gate, load.sum(), 100.0, 0.0, None)


def test_most_used_experts_are_kept_in_order():
    task = pruning.pruned_task(tiny_stacks.sparse(), 0.5)
    found = {
        LAYER: use([5, 1, 5, 9], [4, 8, 2, 1]),
        "decoder.layers[1].feed_forward": use([0, 0, 0, 0], [0, 0, 0, 0]),
    }
    by_load = pruning.chosen(task, found)
    assert [list(experts) for experts in by_load.values()] == [[0, 3], [0, 1]]
    assert list(pruning.chosen(task, found, "gate")[LAYER]) == [0, 1]
    with pytest.raises(ValueError, match="Did you mean 'load'"):
        pruning.chosen(task, found, "laod")


@pytest.mark.parametrize(("keep", "left"), [(0.01, 2), (0.5, 2), (0.7, 3), (1.0, 4)])
def test_at_least_top_k_experts_are_kept(keep, left):
    task = pruning.pruned_task(tiny_stacks.sparse(), keep)
    for stack in (task.encoder, task.decoder):
        assert stack.moe.num_experts == left
        assert stack.moe.router.evaluation_capacity_factor == left


def hashed():
    params = tiny_stacks.sparse()
    params.encoder.moe.router = HashRouter.params()
    return params


@pytest.mark.parametrize(
    ("params", "keep", "words"),
    [
        (tiny_stacks.dense(), 0.5, "no experts to prune"),
        (tiny_stacks.sparse(), 0.0, "keep is 0; more than 0"),
        (tiny_stacks.sparse(), 1.5, "keep is 1.5"),
        (hashed(), 0.5, "encoder.moe.router: HashRouter does not learn"),
    ],
)
def test_unsupported_pruning_is_rejected(params, keep, words):
    with pytest.raises(ValueError, match=words):
        pruning.pruned_task(params, keep)
