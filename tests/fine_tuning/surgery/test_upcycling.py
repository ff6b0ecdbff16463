"""Checks that upcycling keeps the function, copies experts and initializes routers."""

import numpy as np
import pytest

from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.routers import SwitchRouter
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.wings.fine_tuning.surgery import upcycling
from tests.fine_tuning.surgery import tiny_stacks
from tests.layers.stacks.executions import loop, sequential

E = 3
DENSE = "encoder.layers[1].feed_forward"


def upcycled(params, every=0, change=None, with_moments=True):
    """Returns both trainers, the dense arrays and the upcycled state."""
    task = upcycling.upcycled_task(params, E, every)
    if change:
        change(task)
    dense, sparse = tiny_stacks.trainer(params), tiny_stacks.trainer(task)
    theta, moments = tiny_stacks.arrays(dense)
    state = upcycling.upcycled_state(dense, sparse, theta, moments if with_moments else None)
    return dense, sparse, theta, moments, state


def both_logits(params, every=0, change=None):
    dense, sparse, theta, _, state = upcycled(params, every, change)
    theta = unflatten(dense.theta_specs, theta, "weights")
    upcycling.check_same_function(dense.task, theta, sparse.task, state.theta)
    return tiny_stacks.logits(dense, theta), tiny_stacks.logits(sparse, state.theta)


def four_layers(repeat):
    params = tiny_stacks.dense()
    for stack in (params.encoder, params.decoder):
        stack.set(num_layers=4, execution=loop() if repeat else sequential())
    return params


CASES = {
    "biases": (tiny_stacks.dense(), 0),
    "gated": (tiny_stacks.dense(activation="swiglu"), 0),
    "no biases": (tiny_stacks.dense(use_bias=False), 0),
    "all layers alike": (tiny_stacks.task(moe_every=0), 0),
    "every layer": (tiny_stacks.task(moe_every=0), 1),
    "a loop": (four_layers(True), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_upcycled_logits_equal_the_dense_models(case):
    expected, found = both_logits(*CASES[case])
    assert np.ptp(expected) > 1
    assert_close(found, expected, "order")


def test_loop_can_be_upcycled_to_a_different_loop():
    params = four_layers(True)
    for stack in (params.encoder, params.decoder):
        stack.set(moe_every=0)
    expected, found = both_logits(params, 2)
    assert_close(found, expected, "order")


def test_experts_are_copies_and_the_router_is_initialized():
    dense, sparse, theta, moments, state = upcycled(tiny_stacks.dense())
    weights, new_moments = (dict(state[item].flatten_items()) for item in ("theta", "moments"))
    for name in ("w_in", "w_out", "b_in", "b_out"):
        copies = weights[f"{DENSE}.experts.{name}"]
        assert copies.shape[0] == E
        for copy in copies:
            np.testing.assert_array_equal(copy, theta[f"{DENSE}.{name}"])
        assert not new_moments[f"{DENSE}.experts.{name}.first_moment"].any()
    fresh = dict(sparse.init_state().theta.flatten_items())[f"{DENSE}.router.w_gate"]
    np.testing.assert_array_equal(weights[f"{DENSE}.router.w_gate"], fresh.numpy())
    assert f"{DENSE}.w_in" not in weights
    for path in set(theta) & set(weights):
        np.testing.assert_array_equal(weights[path], theta[path])
    kept = set(moments) & set(new_moments)
    assert "encoder.layers[0].feed_forward.w_in.second_moment" in kept
    for path in kept:
        np.testing.assert_array_equal(new_moments[path], moments[path])


def test_moments_are_reset_if_not_copied():
    state = upcycled(tiny_stacks.dense(), with_moments=False)[-1]
    assert not any(moment.any() for moment in state.moments.flatten())


def test_stack_with_experts_keeps_them():
    params = tiny_stacks.sparse()
    params.encoder = tiny_stacks.dense().encoder
    expected, found = both_logits(params)
    assert_close(found, expected, "order")
    assert upcycling.upcycled_task(params, E).decoder == params.decoder


def too_few_layers():
    params = tiny_stacks.dense()
    for stack in (params.encoder, params.decoder):
        stack.set(num_layers=1)
    return params


@pytest.mark.parametrize(
    ("params", "experts", "every", "words"),
    [
        (tiny_stacks.dense(), 1, 0, "num_experts is 1; 2 or more"),
        (tiny_stacks.sparse(), 4, 0, "no dense layers to convert: all of decoder, encoder have"),
        (too_few_layers(), 4, 0, "no dense layers to convert: .*decoder has 1, encoder has 1"),
        (tiny_stacks.dense(), 4, 1, "decoder: .* layers 1, 2, ... differ"),
        (
            four_layers(False),
            4,
            4,
            "decoder: .* layer 1 is decoder.moe.* keep decoder.moe_every = 2",
        ),
    ],
)
def test_unsupported_upcycling_is_rejected(params, experts, every, words):
    with pytest.raises(ValueError, match=words):
        upcycling.upcycled_task(params, experts, every)


def with_capacity(task):
    task.decoder.moe.router.evaluation_capacity_factor = 1.0


def with_top_1(task):
    task.encoder.moe.router = SwitchRouter.params().set(evaluation_capacity_factor=float(E))


def with_shared_expert(task):
    task.encoder.moe.shared_hidden_dim = 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            with_capacity,
            "decoder would compute .* drop .* decoder.moe.router.evaluation_capacity.* = 3",
        ),
        (with_top_1, "encoder would compute .* gates that sum to 1"),
        (with_shared_expert, "encoder would compute .* encoder.moe.shared_hidden_dim"),
    ],
)
def test_settings_that_change_the_function_are_rejected(change, words):
    with pytest.raises(ValueError, match=words):
        both_logits(tiny_stacks.dense(), change=change)


def test_weights_of_another_shape_are_rejected():
    def wider(task):
        task.encoder.moe.hidden_dim = 21

    with pytest.raises(ValueError, match=r"no weights of the shape of encoder.layers\[1\].*21"):
        upcycled(tiny_stacks.dense(), change=wider)


def test_first_dense_layers_are_unchanged():
    params = LanguageModelTask.params().set(vocabulary_size=9, model_dim=4)
    params.decoder.set(num_layers=5, num_heads=1, hidden_dim=4, moe_every=0, dense_first=1)
    sparse = upcycling.upcycled_task(params, num_experts=2).instantiate()
    kinds = [type(layer.feed_forward) for layer, _ in sparse.decoder.layer_counts()]
    assert kinds == [FeedForward, FeedForward, MixtureOfExperts, FeedForward, MixtureOfExperts]
