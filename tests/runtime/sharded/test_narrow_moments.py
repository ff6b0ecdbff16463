# tests: training/step/optimizer.py, training/run/checkpoint/trainer_state.py
"""Tests low-precision moments, sharded and in checkpoints."""

import numpy as np
import pytest

from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.checkpoint.trainer_state import restored_state
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.trainer import Trainer
from tests import tiny
from tests.runtime import trainings

STEPS = 4


def make_trainer(dtype: str) -> Trainer:
    params = tiny.experiment_params()
    params.step.optimizer = Adam.params().set(moment_dtype=dtype, epsilon=1e-6)
    params.task.output.sizes = (tiny.HIDDEN, 8)
    return params.step.instantiate(params.task.instantiate(), params.run.steps)


def trained(runtime):
    trainings.train(runtime, STEPS, lambda index: tiny.make_batch(1, index))
    return runtime.state()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_trains_under_zero1_as_on_one_device(dtype):
    """Random numbers are equal on every mesh; moments differ only by rounding of sums."""
    local = trainings.on_one_device(make_trainer(dtype))
    split = trainings.on_mesh(make_trainer(dtype), "data=4", "zero1", local.state())
    expected, found = trained(local), trained(split)
    for (path, one), other in zip(expected.flatten_items(), found.flatten(), strict=True):
        one, other = (np.asarray(x).astype(np.float32) for x in (one, other))
        close = np.isclose(one, other, rtol=1e-3, atol=1e-5)
        assert close.mean() > 0.9, path
    moments = found.moments.output.w
    parts = {name: moment.addressable_shards[0].data.shape for name, moment in moments.items()}
    assert parts["second_moment"] == (2, 8)
    assert moments.second_moment.dtype == {"bfloat16": "bfloat16", "int8": "uint8"}[dtype]
    if dtype == "int8":
        assert parts["second_moment_scale"] == (2,)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_checkpoint_restores_narrow_moments(tmp_path, dtype):
    trainer = make_trainer(dtype)
    state = trained(trainings.on_one_device(trainer))
    store = CheckpointStore(tmp_path)
    store.save(STEPS, state, {}, "", lambda directory: None)
    assert store.finish()
    read = restored_state(trainer, store.restore(None))
    store.close()
    for (path, one), other in zip(state.flatten_items(), read.flatten(), strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype, path
        np.testing.assert_array_equal(one, other, err_msg=path)
