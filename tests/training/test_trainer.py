# tests: training/step/trainer.py, training/step/gradients.py, training/step/state_part.py
# tests: training/step/clipping.py
"""Tests the training step: randomness, clipping, and non-finite steps."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.training.step import schedules
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.trainer import Trainer
from tests import tiny


def make_trainer(**values) -> Trainer:
    params: Params = tiny.experiment_params()
    tiny.set_options(params, **values)
    return params.step.instantiate(params.task.instantiate(), params.run.steps)


def arrays(tree):
    return [np.asarray(value) for value in tf.nest.flatten(tree)]


def assert_same(mine, theirs):
    for one, other in zip(arrays(mine), arrays(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_initial_state_depends_only_on_the_seed():
    assert_same(make_trainer().init_state(), make_trainer().init_state())
    other = make_trainer(seed=2).init_state()
    assert not np.array_equal(other.theta.hidden.w, make_trainer().init_state().theta.hidden.w)


def test_state_matches_its_specs():
    trainer = make_trainer()
    state, specs = trainer.init_state(), trainer.state_specs()
    for (path, value), (spec_path, spec) in zip(
        state.flatten_items(), specs.flatten_items(), strict=True
    ):
        assert path == spec_path
        assert (tuple(value.shape), value.dtype.name) == (spec.shape, spec.dtype)


def test_dropout_depends_only_on_seed_and_step():
    trainer, batch = make_trainer(), tiny.make_batch(1, 0)
    state = trainer.init_state()
    loss = trainer.train_step(state, batch)[1].loss
    assert float(loss) == float(trainer.train_step(state, batch)[1].loss)
    state.step += 1
    assert float(loss) != float(trainer.train_step(state, batch)[1].loss)


def test_step_counter_and_metrics():
    trainer = make_trainer()
    state, metrics = trainer.train_step(trainer.init_state(), tiny.make_batch(1, 0))
    assert int(state.step) == 1 and not bool(state.stopped)
    assert set(metrics) >= {"loss", "accuracy", "tokens", "gradient_norm", "learning_rate"}
    assert "hidden_mean" in metrics
    assert all(value.dtype == tf.float32 and value.shape == () for value in metrics.values())


@pytest.mark.parametrize("clip_norm", [0.0, 0.01, 100.0])
def test_gradients_are_clipped_by_global_norm(clip_norm):
    """With beta1 = 0 and a huge epsilon, Adam is gradient descent and reveals the gradient."""
    optimizer = Adam.params().set(beta1=0.0, epsilon=1e6)
    schedule = schedules.Constant.params().set(learning_rate=1e6)
    trainer = make_trainer(clip_norm=clip_norm, optimizer=optimizer, schedule=schedule)
    state, batch = trainer.init_state(), tiny.make_batch(1, 0)
    _, _, gradients = trainer.gradients(state.theta, batch, tf.constant([1, 1]))
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in arrays(gradients)))
    new_state, metrics = trainer.train_step(state, batch)
    np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-5)
    scale = min(1.0, clip_norm / norm) if clip_norm else 1.0
    for old, new, gradient in zip(
        arrays(state.theta), arrays(new_state.theta), arrays(gradients), strict=True
    ):
        np.testing.assert_allclose(old - new, scale * gradient, rtol=1e-3, atol=1e-6)


def test_state_is_frozen_after_a_non_finite_step():
    trainer = make_trainer()
    state, _ = trainer.train_step(trainer.init_state(), tiny.make_batch(1, 0))
    batch = tiny.make_batch(1, 1)
    batch["x"][0, 0] = np.inf
    stopped, metrics = trainer.train_step(state, batch)
    assert not np.isfinite(metrics.gradient_norm)
    assert bool(stopped.stopped)
    later, _ = trainer.train_step(stopped, tiny.make_batch(1, 2))
    for name in ("step", "theta", "moments"):
        assert_same(stopped[name], state[name])
        assert_same(later[name], state[name])


def test_evaluation_is_token_weighted_and_without_dropout():
    trainer, batch = make_trainer(), tiny.make_batch(1, 0)
    theta = trainer.init_state().theta
    metrics = trainer.eval_step(theta, batch)
    assert [float(x) for x in metrics.loss] == [
        float(x) for x in trainer.eval_step(theta, batch).loss
    ]
    assert float(metrics.loss[1]) == 16.0
    hidden = np.maximum(batch["x"] @ arrays(theta.hidden.w)[0] + theta.hidden.b.numpy(), 0)
    np.testing.assert_allclose(metrics.hidden_mean[0], hidden.mean(), rtol=1e-5)


def test_schedule_without_an_end_ends_with_the_run():
    schedule = schedules.Linear.params().set(learning_rate=1.0)
    trainer = make_trainer(steps=8, schedule=schedule)
    np.testing.assert_allclose(trainer.schedule(tf.constant(4)), 0.5)
