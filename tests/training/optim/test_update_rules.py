# tests: training/step/trainer.py, training/step/optimizer.py
"""Checks that weights with an update rule follow the values that their layers report."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.run.checkpoint.arrays import unflatten
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.step import schedules
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.trainer import Trainer

M = 3


def follow(weight: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    return 0.5 * weight + value


class Counting(Task):
    """Computes w * x, and reports the size of x to a weight with an update rule."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("reports", True, "Whether it reports.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        sizes, one = {"M": M}, initializers.constant(1.0)
        self.create_variable("w", "M", sizes, one)
        self.create_variable("seen", "M", sizes, one, update_rule=follow)

    @layer_method
    def loss(self, theta, batch):
        if self.p.reports:
            self.report_update("seen", theta.seen, tf.reduce_sum(batch["x"], 0))
        reports = tf.add_n([0.0, *context.current().losses.values()])
        return tf.reduce_sum(theta.w * batch["x"]) + reports, NestedMap()


def make(optimizer=Adam, reports: bool = True, **values) -> Trainer:
    params = Trainer.params().set(
        optimizer=optimizer.params(), schedule=schedules.Constant.params(), **values
    )
    return params.instantiate(Counting.params().set(reports=reports).instantiate(path=""))


def batch(index: int, scale: float = 1.0) -> dict[str, tf.Tensor]:
    x = scale * np.random.default_rng(index).normal(size=(4, M))
    return {"x": tf.constant(x, tf.float32)}


@pytest.mark.parametrize("clip_norm", [0.0, 0.01])
@pytest.mark.parametrize("optimizer", [Adam, Adafactor])
def test_weight_with_a_rule_ignores_the_optimizer(optimizer, clip_norm):
    """The update uses the report without clipping, with any optimizer."""
    trainer = make(optimizer, clip_norm=clip_norm)
    step = tf.function(trainer.train_step, autograph=False)
    state, expected = trainer.init_state(), np.ones(M)
    for index in range(3):
        state, _ = step(state, batch(index))
        expected = 0.5 * expected + batch(index)["x"].numpy().sum(0)
        np.testing.assert_allclose(state.theta.seen, expected, rtol=1e-5)


def test_weight_with_a_rule_has_no_moments():
    state = make().init_state()
    assert state.moments.seen == {} and state.moments.w.keys()


def test_other_weights_are_unaffected_by_a_rule():
    """Reports change neither the gradient norm nor the clipping nor the loss."""
    results = []
    for reports in (False, True):
        trainer = make(reports=reports, clip_norm=0.01)
        results.append(trainer.train_step(trainer.init_state(), batch(1)))
    (silent, silent_metrics), (state, metrics) = results
    np.testing.assert_array_equal(state.theta.w, silent.theta.w)
    for name in ("loss", "gradient_norm"):
        assert float(metrics[name]) == float(silent_metrics[name])
    np.testing.assert_allclose(metrics.gradient_norm, np.linalg.norm(batch(1)["x"].numpy().sum(0)))


def test_weight_with_a_rule_is_frozen_after_a_non_finite_step():
    trainer = make()
    state, _ = trainer.train_step(trainer.init_state(), batch(1))
    bad = {"x": tf.fill([4, M], np.inf)}
    stopped, _ = trainer.train_step(state, bad)
    assert bool(stopped.stopped)
    later, _ = trainer.train_step(stopped, batch(2))
    for other in (stopped, later):
        np.testing.assert_array_equal(other.theta.seen, state.theta.seen)


def test_weight_with_a_rule_stays_float32():
    specs = Counting.params().set(dtype="bfloat16").instantiate(path="").variable_specs()
    assert (specs.w.dtype, specs.seen.dtype) == ("bfloat16", "float32")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_weight_with_a_rule_is_saved_and_restored(tmp_path):
    trainer = make()
    step = functools.partial(tf.function(trainer.train_step, autograph=False), batch=batch(1))
    state, _ = step(trainer.init_state())
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(1, state.transform(np.asarray), {}, "name : 1\n", lambda directory: None)
    store.finish()
    read = store.restore()
    store.close()
    assert read.theta.keys() == {"w", "seen"}
    assert not [path for path in read.moments if path.startswith("seen")]
    specs = trainer.state_specs()
    restored = NestedMap(
        state,
        theta=unflatten(specs.theta, read.theta, "theta").transform(tf.constant),
        moments=unflatten(specs.moments, read.moments, "moments").transform(tf.constant),
    )
    for one, other in zip(step(restored)[0].flatten(), step(state)[0].flatten(), strict=True):
        np.testing.assert_array_equal(one, other)
