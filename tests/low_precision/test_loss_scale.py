# tests: wings/low_precision/loss_scale.py, training/step/precision.py
"""Tests loss scaling: changes of the scale, skipped steps, and failed runs."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.wings.low_precision.loss_scale import LossScale
from lingvo_gshard.wings.services.divergence import NonFiniteError
from tests import tiny
from tests.training import mixed_task
from tests.training.test_loop import Run

# With it the gradients of mixed_task are not finite in float16, and are finite long before 2^15.
TOO_LARGE = 2.0**26


def scaled_by(**values):
    return LossScale.params().set(**values)


def assert_same(mine, theirs):
    for one, other in zip(mine.flatten(), theirs.flatten(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_loss_scale_follows_the_recurrence():
    rule = LossScale(
        scaled_by(initial=8.0, growth_interval=3, growth_factor=4.0, backoff_factor=0.5, minimum=2)
    )
    state = rule.begin(NestedMap())
    scale, good, skipped = 8.0, 0, 0
    for finite in np.random.default_rng(3).random(60) < 0.7:
        state = rule.update(state, tf.constant(finite))
        good = good + 1 if finite else 0
        skipped += not finite
        scale = scale if finite else max(scale * 0.5, 2.0)
        if good == 3:
            scale, good = scale * 4.0, 0
        assert (float(state.scale), int(state.good_steps)) == (scale, good)
        assert int(state.skipped_steps) == skipped


def test_loss_scale_stays_in_float32_range():
    rule = LossScale(scaled_by(initial=2.0**127, growth_interval=1))
    assert float(rule.update(rule.begin(NestedMap()), tf.constant(True)).scale) == 2.0**127


def test_steps_are_skipped_until_gradients_are_finite():
    trainer = mixed_task.trainer(
        precision="float16", loss_scale=scaled_by(initial=TOO_LARGE), average_decay=0.9
    )
    state, rows = trainer.init_state(), []
    for index in range(40):
        new_state, metrics = trainer.train_step(state, tiny.make_batch(1, index))
        rows.append({name: float(value) for name, value in metrics.items()})
        finite = np.isfinite(rows[-1]["gradient_norm"])
        assert int(new_state.step) == index + 1 and not bool(new_state.stopped)
        assert not trainer.should_stop(rows[-1])
        if not finite:
            for part in ("theta", "moments", "averages"):
                assert_same(new_state[part], state[part])
            assert float(new_state.loss_scale.scale) == rows[-1]["loss_scale"] / 2
        state = new_state
    skipped = int(state.loss_scale.skipped_steps)
    assert (
        skipped
        == rows[-1]["skipped_steps"]
        == sum(not np.isfinite(row["gradient_norm"]) for row in rows)
    )
    assert 3 < skipped < 20 and float(state.loss_scale.scale) == TOO_LARGE / 2**skipped
    assert np.mean([r["loss"] for r in rows[-5:]]) < 0.8 * rows[0]["loss"]


def test_optimizers_count_only_applied_steps():
    """Adam's first update has the size of the learning rate only if skipped steps do not count."""
    trainer = mixed_task.trainer(precision="float16", loss_scale=scaled_by(initial=TOO_LARGE))
    state, batch = trainer.init_state(), tiny.make_batch(1, 0)
    start = state.theta.w_in.numpy()
    while np.array_equal(state.theta.w_in, start):
        state, _ = trainer.train_step(state, batch)
    assert int(state.step) > 3
    moved = np.abs(state.theta.w_in.numpy() - start)
    np.testing.assert_allclose(moved.max(), 0.03, rtol=0.01)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_loss_scaling_prevents_underflow_and_changes_no_other_gradients(micro_batches):
    batch = {name: tf.constant(x) for name, x in tiny.make_batch(1, 0, rows=1024).items()}

    def gradients(precision, scale):
        trainer = mixed_task.trainer(precision=precision, micro_batches=micro_batches)
        theta = NestedMap(trainer.init_state().theta)
        # Gradients of hidden activations are about 1e-8 per row; float16 underflows below 6e-8.
        theta.w_out = theta.w_out * 1e-4
        scale = tf.constant(scale) if scale else None
        return trainer.gradients(theta, batch, tf.constant([1, 1]), scale=scale)

    loss, _, expected = gradients("float32", None)
    same_loss, _, same = gradients("float32", 2.0**15)
    assert float(loss) == float(same_loss)
    assert_same(expected, same)

    def error(found):
        assert found.w_in.dtype == tf.float32
        return tf.norm(found.w_in - expected.w_in) / tf.norm(expected.w_in)

    lost, saved = (error(gradients("float16", scale)[2]) for scale in (1.0, 2.0**15))
    assert saved < 0.02 and lost > 0.2


def test_non_finite_step_at_the_minimum_scale_stops_training():
    trainer = mixed_task.trainer(precision="float16", loss_scale=scaled_by(initial=2.0))
    state, batch = trainer.init_state(), tiny.make_batch(1, 0)
    batch["x"][0, 0] = np.inf
    state, metrics = trainer.train_step(state, batch)
    assert not bool(state.stopped) and not trainer.should_stop(metrics)
    assert float(state.loss_scale.scale) == 1.0
    stopped, metrics = trainer.train_step(state, batch)
    assert bool(stopped.stopped) and trainer.should_stop(metrics)
    later, _ = trainer.train_step(stopped, tiny.make_batch(1, 1))
    for part in ("theta", "moments", "loss_scale"):
        assert_same(stopped[part], state[part])
        assert_same(later[part], state[part])
    assert int(later.step) == 1


def test_a_first_scale_below_the_smallest_is_rejected():
    with pytest.raises(ValueError, match=r"step\.loss_scale\.initial is 0.5; minimum, 1.0"):
        mixed_task.trainer(precision="float16", loss_scale=scaled_by(initial=0.5))


class MixedRun(Run):
    """The tiny experiment with a task whose activations are float16."""

    def __init__(self, path, poisoned=0, **trainer):
        super().__init__(path, precision="float16", **trainer)
        self.params.task = mixed_task.MixedTask.params()
        self.params.input.poisoned_batch = poisoned


@pytest.mark.slow
def test_run_continues_after_a_skipped_step_and_from_a_checkpoint(tmp_path):
    run = MixedRun(tmp_path / "run", poisoned=3)
    run.go()
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["gradient_norm"] is None for row in rows] == [i == 2 for i in range(12)]
    assert [row["loss_scale"] for row in rows] == [2.0**15] * 3 + [2.0**14] * 9
    assert [row["skipped_steps"] for row in rows] == [0.0] * 2 + [1.0] * 10
    assert int(run.runtime.state().loss_scale.skipped_steps) == 1
    longer = MixedRun(tmp_path / "run", poisoned=3, steps=16)
    longer.go()
    assert [row["skipped_steps"] for row in longer.rows()] == [0.0] * 2 + [1.0] * 14
    assert longer.rows()[-1]["loss_scale"] == 2.0**14


def test_stopped_run_names_the_step_and_loss(tmp_path):
    run = MixedRun(tmp_path / "run", poisoned=3, loss_scale=scaled_by(initial=1.0))
    with pytest.raises(NonFiniteError, match="step 3: loss nan"):
        run.go()
