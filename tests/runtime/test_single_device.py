# tests: runtime/single_device.py, training/run/runtime_protocol.py
"""Checks that the single-device runtime runs the trainer's steps and compiles once per shape."""

import numpy as np
import pytest

from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from tests import tiny


@pytest.fixture
def trainer():
    params = tiny.experiment_params()
    return params.step.instantiate(params.task.instantiate(), params.run.steps)


@pytest.fixture
def runtime(trainer):
    runtime = SingleDeviceRuntime(trainer)
    runtime.init_state()
    return runtime


def test_runs_the_trainers_steps(trainer, runtime):
    state = trainer.init_state()
    for index in range(3):
        batch = tiny.make_batch(1, index)
        state, expected = trainer.train_step(state, batch)
        found = runtime.train_step(batch).read()
        assert found.keys() == expected.keys()
        # The largest logit, and so accuracy, is not smooth in the weights.
        for name in expected.keys() - {"accuracy"}:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, err_msg=name)
    assert runtime.step == 3
    for mine, theirs in zip(runtime.state().flatten(), state.flatten(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_evaluation_equals_the_trainers(trainer, runtime):
    batch = tiny.make_batch(2, 0)
    expected = trainer.eval_step(trainer.init_state().theta, batch)
    found = runtime.eval_step(batch)
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        np.testing.assert_allclose(found[name], [float(x) for x in pair], rtol=1e-5)


def test_compiles_once_per_shape(trainer, runtime, monkeypatch):
    traced = []
    for name in ("train_step", "eval_step"):
        step = getattr(trainer, name)
        monkeypatch.setattr(trainer, name, lambda *a, step=step: traced.append(a) or step(*a))
    for rows in (16, 16, 8, 16, 8):
        runtime.train_step(tiny.make_batch(1, rows, rows))
    assert len(traced) == 2
    runtime.eval_step(tiny.make_batch(1, 0))
    runtime.eval_step(tiny.make_batch(1, 1))
    assert len(traced) == 3
    assert [each.function for each in runtime.compilations] == ["train", "train", "eval"]
    assert all(each.seconds > 0 for each in runtime.compilations)


def test_resumes_from_a_state_it_returned(trainer, runtime):
    for index in range(2):
        runtime.train_step(tiny.make_batch(1, index))
    other = SingleDeviceRuntime(trainer)
    other.load_state(runtime.state())
    mine = runtime.train_step(tiny.make_batch(1, 2)).read()
    assert other.train_step(tiny.make_batch(1, 2)).read() == mine
    for one, two in zip(runtime.state().flatten(), other.state().flatten(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_exported_state_is_a_copy(runtime):
    before = runtime.state()
    kept = before.theta.hidden.w.copy()
    runtime.train_step(tiny.make_batch(1, 0))
    np.testing.assert_array_equal(before.theta.hidden.w, kept)
    assert not np.array_equal(runtime.state().theta.hidden.w, kept)


def test_a_state_can_be_replaced_after_compiling(trainer, runtime):
    first = runtime.state()
    values = [runtime.train_step(tiny.make_batch(1, i)).read()["loss"] for i in range(2)]
    runtime.load_state(first)
    assert [runtime.train_step(tiny.make_batch(1, i)).read()["loss"] for i in range(2)] == values
    assert len(runtime.compilations) == 1
