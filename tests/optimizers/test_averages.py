"""Tests weight averages: the recurrence, checkpoints and evaluation."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.checkpoint.trainer_state import restored_state
from lingvo_gshard.wings.fine_tuning.surgery import conversion
from lingvo_gshard.wings.optimizers.averages import Averages
from tests import tiny
from tests.training import mixed_task
from tests.training.optim import test_update_rules
from tests.training.test_loop import Run


def trainer_of(**values):
    params = tiny.experiment_params()
    params.task.output.sizes = (tiny.HIDDEN, 8)
    tiny.set_options(params, average_decay=0.5, **values)
    return params.step.instantiate(params.task, params.run.steps)


def floats(tree):
    return [np.asarray(x).astype(np.float32) for x in tree.flatten()]


def assert_same(mine, theirs):
    for one, other in zip(floats(mine), floats(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("precision", ["float32", "bfloat16_weights"])
@pytest.mark.parametrize("decay", [0.25, 0.9])
def test_averages_follow_the_recurrence(decay, precision):
    trainer = mixed_task.trainer(average_decay=decay, precision=precision)
    state = trainer.init_state()
    assert_same(state.averages, state.theta)
    expected = floats(state.theta)
    for t in range(8):
        state, _ = trainer.train_step(state, tiny.make_batch(1, t))
        d = min(decay, (1 + t) / (10 + t))
        expected = [d * a + (1 - d) * w for a, w in zip(expected, floats(state.theta), strict=True)]
        for average, a in zip(state.averages.flatten(), expected, strict=True):
            assert average.dtype == tf.float32
            np.testing.assert_allclose(average, a, rtol=1e-5, atol=1e-6)
    evaluated = trainer.evaluated_theta(state.averages)
    assert [w.dtype for w in evaluated.flatten()] == [w.dtype for w in state.theta.flatten()]


def test_weights_with_an_update_rule_are_averaged():
    trainer = test_update_rules.make(average_decay=0.5)
    state = trainer.init_state()
    new_state, _ = trainer.train_step(state, test_update_rules.batch(1))
    assert np.abs(new_state.theta.seen - state.theta.seen).max() > 0.1
    expected = 0.1 * state.theta.seen + 0.9 * new_state.theta.seen
    np.testing.assert_allclose(new_state.averages.seen, expected, rtol=1e-5)


def test_averages_are_unchanged_in_a_stopped_step():
    trainer = trainer_of()
    state, _ = trainer.train_step(trainer.init_state(), tiny.make_batch(1, 0))
    batch = tiny.make_batch(1, 1)
    batch["x"][0, 0] = np.inf
    stopped, _ = trainer.train_step(state, batch)
    assert_same(stopped.averages, state.averages)


def test_no_averages_without_a_decay():
    trainer = mixed_task.trainer()
    assert "averages" not in trainer.state_specs() and "averages" not in trainer.init_state()
    assert trainer.evaluated_part == "theta"


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_out_of_range_decay_is_rejected(decay):
    with pytest.raises(ValueError, match=rf"Trainer\.average_decay is {decay}"):
        mixed_task.trainer(average_decay=decay)


def read_by(runtime):
    """Returns the weights as evaluation and bound functions see them."""
    total = runtime.bind_weights(
        lambda theta, ids: (
            tf.reduce_sum(theta.hidden.w) + 0.0 * tf.cast(tf.reduce_sum(ids), tf.float32)
        )
    )
    return runtime.eval_step(tiny.make_batch(7, 0))["loss"][0], total(np.zeros([4, 2], np.int32))


@pytest.mark.slow
def test_averages_are_evaluated_and_sharded_like_moments():
    trainer = trainer_of()
    local = SingleDeviceRuntime(trainer)
    local.init_state()
    start = local.state()
    partitioning = Partitioning.make("data=4", "zero1")
    split = SpmdRuntime(trainer_of(), partitioning, devices_for(4))
    split.load_state(start)
    for runtime in (local, split):
        for index in range(3):
            runtime.train_step(tiny.make_batch(1, index)).read()
    found = split.state()
    assert found.averages.output.w.addressable_shards[0].data.shape == (2, 8)
    assert found.theta.output.w.addressable_shards[0].data.shape == (8, 8)
    kept = local.state()
    for one, other in zip(floats(kept), floats(found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    tensors = kept.transform(tf.constant)
    expected, of_theta = (
        float(trainer.eval_step(part, tiny.make_batch(7, 0)).loss[0])
        for part in (tensors.averages, tensors.theta)
    )
    assert abs(expected - of_theta) > 1e-3
    alone = SingleDeviceRuntime(trainer)
    alone.load_theta(kept.averages)
    for runtime in (local, split, alone):
        loss, total = read_by(runtime)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
        np.testing.assert_allclose(total, kept.averages.hidden.w.sum(), rtol=1e-4)


def test_averages_are_restored_or_start_from_the_weights(tmp_path):
    trainer = trainer_of()
    state, _ = trainer.train_step(trainer.init_state(), tiny.make_batch(1, 0))
    store = CheckpointStore(tmp_path)
    store.save(1, state.transform(np.asarray), {}, "", lambda directory: None)
    assert store.finish()
    whole, alone = store.restore(), store.restore(parts=("averages",))
    assert not alone.theta
    assert_same(NestedMap(alone.arrays["averages"]), state.averages)
    assert_same(restored_state(trainer, whole).averages, state.averages)
    del whole.arrays["averages"]
    assert_same(restored_state(trainer, whole).averages, state.theta)
    store.close()


def test_averages_start_with_pretrained_weights():
    trainer = trainer_of()
    state = conversion.of_trainer(
        trainer, lambda name, layout, shape: np.full(shape, 2.0, np.float32), lambda *_: None
    )
    assert_same(state.averages, state.theta)
    assert all(isinstance(x, np.ndarray) for x in state.averages.flatten())


def test_run_can_start_averaging(tmp_path):
    Run(tmp_path / "run", steps=4).go()
    run = Run(tmp_path / "run", steps=8, average_decay=0.9)
    run.go()
    state = run.runtime.state()
    assert not np.array_equal(state.averages.hidden.w, state.theta.hidden.w)
    assert Averages.name in state
