# tests: wings/optimizers/spikes.py, training/step/state_part.py
"""Tests spikes: statistics against NumPy, skipped steps, resuming, and the same on a mesh."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.state_part import Seen
from lingvo_gshard.wings.optimizers.spikes import Spikes
from tests import tiny
from tests.training import mixed_task
from tests.training.test_loop import Run, without_speed

# Batches, counted from 0, that TinyBatches would not make: their inputs are a hundred times larger.
SPIKED = (7, 10)


def spikes(policy="skip", **values):
    return Spikes.params().set(policy=policy, warmup_steps=4, window=6, **values)


def judged(rule, state, loss, norm, is_finite=True):
    values = tf.constant(loss, tf.float32), tf.constant(norm, tf.float32)
    return rule.judge(state, Seen(*values, tf.constant(is_finite), {}))


def spiked_batch(index, spiked=SPIKED):
    batch = tiny.make_batch(1, index)
    return {**batch, "x": batch["x"] * 100} if index in spiked else batch


def weighted_mean_and_deviation(values, window):
    """Returns those of all values, of which value n, from 1, enters with the share 1 / n."""
    shares = 1.0 / np.minimum(np.arange(1, len(values) + 1), window)
    kept = np.cumprod((1 - shares)[::-1])[::-1]
    weights = shares * np.append(kept[1:], 1.0)
    mean = np.sum(weights * values)
    return mean, np.sqrt(np.sum(weights * (values - mean) ** 2))


def test_statistics_equal_those_of_numpy_over_accepted_steps():
    rule = spikes(deviations=4.0).instantiate()
    generator, state = np.random.default_rng(2), rule.begin(NestedMap())
    accepted, found = [], 0
    for index in range(60):
        loss, norm = generator.normal(5, 0.1), np.exp(generator.normal(0, 0.2))
        is_finite = index % 13 != 5
        loss += 3 * (index in (2, 20, 41))
        norm *= 30 if index in (33, 41) else 1
        row = np.array([loss, norm], np.float32)
        is_spike = False
        if is_finite and len(accepted) >= 4:
            pairs = [weighted_mean_and_deviation(x, 6) for x in np.float64(accepted).T]
            heights = [
                (x - mean) / max(deviation, 0.01 * mean)
                for x, (mean, deviation) in zip(row, pairs, strict=True)
            ]
            is_spike = max(heights) > 4
        verdict = judged(rule, state, *row, is_finite)
        assert bool(verdict.is_skipped) == is_spike, index
        if is_finite and len(accepted) >= 4:
            names = "loss_deviations", "gradient_norm_deviations"
            mine = [float(verdict.metrics[name]) for name in names]
            np.testing.assert_allclose(mine, heights, rtol=2e-3, atol=2e-3)
        state, found = verdict.state, found + is_spike
        assert int(verdict.metrics["spike"]) == is_spike
        assert int(state.found) == int(state.skipped) == found
        if is_finite and not is_spike:
            accepted.append(row)
    assert 3 <= found <= 8
    # Until the window is full they are the plain mean and deviation.
    np.testing.assert_allclose(
        weighted_mean_and_deviation(np.array([3.0, 5.0, 10.0]), 6),
        (np.mean([3, 5, 10]), np.std([3, 5, 10])),
    )


def test_a_level_that_stays_is_accepted():
    rule = spikes(most_in_a_row=3).instantiate()
    state, skipped = rule.begin(NestedMap()), []
    for loss in [2.0] * 6 + [9.0] * 12 + [90.0]:
        verdict = judged(rule, state, loss, 1.0)
        state = verdict.state
        skipped.append(bool(verdict.is_skipped))
    assert skipped == [False] * 6 + [True] * 3 + [False] * 9 + [True]


def test_losses_that_fall_or_do_not_change_are_no_spikes():
    for losses in ([3.0] * 30, [0.0] * 30, 9.0 * 0.8 ** np.arange(30), -np.arange(30.0)):
        rule = spikes().instantiate()
        state = rule.begin(NestedMap())
        for loss in losses:
            state = judged(rule, state, loss, 0.0).state
        assert int(state.found) == 0


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_only_a_skipped_step_leaves_the_weights_unchanged(policy):
    trainer = mixed_task.trainer(spikes=spikes(policy), average_decay=0.9)
    state, found = trainer.init_state(), []
    for index in range(13):
        new_state, metrics = trainer.train_step(state, spiked_batch(index))
        is_same = [
            np.array_equal(mine, theirs)
            for part in ("theta", "moments", "averages")
            for mine, theirs in zip(new_state[part].flatten(), state[part].flatten(), strict=True)
        ]
        assert all(is_same) if metrics.spike and policy == "skip" else not any(is_same)
        assert int(new_state.step) == index + 1
        found += [index] if metrics.spike else []
        state = new_state
    assert found == list(SPIKED)
    assert int(state.spikes.skipped) == (2 if policy == "skip" else 0)


def test_skipping_equals_training_without_the_batch():
    """Weights, moments and the optimizer's count are those of a run that never saw the batch."""
    trainer, plain = mixed_task.trainer(spikes=spikes()), mixed_task.trainer()
    state, expected = trainer.init_state(), plain.init_state()
    for index in range(12):
        state, _ = trainer.train_step(state, spiked_batch(index))
        if index not in SPIKED:
            expected, _ = plain.train_step(expected, spiked_batch(index))
    for part in ("theta", "moments"):
        for mine, theirs in zip(state[part].flatten(), expected[part].flatten(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="policy is 'skipp'; expected 'off', 'warn', 'skip'"):
        mixed_task.trainer(spikes=spikes("skipp"))


class SpikedBatches(tiny.TinyBatches):
    def __next__(self):
        batch, index = super().__next__(), self._index - 1
        return {**batch, "x": batch["x"] * 100} if index in SPIKED else batch


class SpikedInput(tiny.TinyInput):
    def train_batches(self, seed):
        return SpikedBatches(self.p, seed)


def run(path, policy, steps=12):
    made = Run(path, steps, spikes=spikes(policy))
    made.params.input = SpikedInput.params()
    made.go()
    return made


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = run(tmp_path / "whole", "skip")
    # The statistics are saved between the two spikes, of steps 8 and 11.
    run(tmp_path / "resumed", "skip", steps=9)
    resumed = run(tmp_path / "resumed", "skip")
    rows = resumed.rows()
    assert [row["step"] for row in rows if row["spike"]] == [8, 11]
    assert [row["spikes"] for row in rows] == [0.0] * 7 + [1.0] * 3 + [2.0] * 2
    assert "step 11 is a spike, and its update was discarded: loss" in resumed.screen.getvalue()
    assert "spikes: 2 since the first step of the run" in resumed.screen.getvalue()
    for row in rows:
        # The shorter run's last step evaluated, as every last step does.
        if row["step"] == 9:
            assert [row.pop(name) for name in list(row) if name.startswith("dev/")]
    assert without_speed(rows) == without_speed(whole.rows())
    mine, theirs = resumed.arrays(), whole.arrays()
    for name, value in theirs.items():
        np.testing.assert_array_equal(mine[name], value)
    for one, two in zip(
        resumed.runtime.state().spikes.flatten(),
        whole.runtime.state().spikes.flatten(),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_warnings_change_nothing_and_a_policy_may_change(tmp_path):
    warned, plain = run(tmp_path / "warned", "warn"), run(tmp_path / "plain", "off")
    assert "step 8 is a spike, and it was trained on: loss" in warned.screen.getvalue()
    mine, theirs = warned.arrays(), plain.arrays()
    for name, value in theirs.items():
        np.testing.assert_array_equal(mine[name], value)
    longer = run(tmp_path / "plain", "skip", steps=14)
    assert [row.get("spikes") for row in longer.rows()] == [None] * 12 + [0.0] * 2
    again = run(tmp_path / "warned", "off", steps=14)
    assert "spikes" not in again.rows()[-1] and "spikes" not in again.runtime.state()


@pytest.mark.slow
def test_a_mesh_skips_the_same_steps():
    params = tiny.experiment_params()
    trainer = params.step.set(spikes=spikes()).instantiate(params.task)
    local = SingleDeviceRuntime(trainer)
    sharded = SpmdRuntime(trainer, Partitioning.make("data=2", "fsdp"), devices_for(2))
    local.init_state()
    sharded.load_state(local.state())
    for index in range(12):
        batch = spiked_batch(index)
        expected, found = local.train_step(batch).read(), sharded.train_step(batch).read()
        assert found["spike"] == expected["spike"] == (index in SPIKED)
        for name in ("loss", "gradient_norm"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4)
    mine, theirs = sharded.state().transform(np.asarray), local.state()
    for path, value in theirs.flatten_items():
        np.testing.assert_allclose(
            dict(mine.flatten_items())[path], value, rtol=1e-3, atol=1e-6, err_msg=path
        )
