# tests: runtime/program/padding.py, runtime/spmd.py
"""Checks a state that is padded in storage: its parts, its steps and what is seen of it."""

import numpy as np
import pytest

from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Constant
from lingvo_gshard.training.step.trainer import Trainer
from tests.runtime import trainings

pytestmark = pytest.mark.slow

M, DEVICES = 64, 6


def make_trainer(precision: str) -> Trainer:
    task = LanguageModelTask.params().set(vocabulary_size=32, model_dim=M)
    task.decoder.set(num_layers=1, num_heads=2, hidden_dim=64, moe_every=0)
    schedule = Constant.params().set(learning_rate=0.01)
    params = Trainer.params().set(optimizer=Adam.params(), schedule=schedule, precision=precision)
    return params.instantiate(task)


def batch(step: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(step).integers(1, 32, (12, 8)).astype(np.int32)
    positions = np.tile(np.arange(8, dtype=np.int32), (12, 1))
    labels, segments = np.roll(ids, 1, 1), np.ones_like(ids)
    names = ("inputs", "labels", "positions", "segments")
    arrays = (ids, labels, positions, segments)
    return {f"target_{name}": array for name, array in zip(names, arrays, strict=True)}


@pytest.mark.parametrize(
    ("strategy", "precision"), [("zero1", "bfloat16"), ("zero1", "float32"), ("fsdp", "float32")]
)
def test_six_devices_train_as_one_and_another_mesh_goes_on(strategy, precision):
    local = trainings.on_one_device(make_trainer(precision))
    split = trainings.on_mesh(make_trainer(precision), f"data={DEVICES}", strategy, local.state())
    for step in range(2):
        one, other = (runtime.train_step(batch(step)).read() for runtime in (local, split))
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=2e-3)
    seen = split.state()
    for shown, array in zip(split.abstract_state().flatten(), seen.flatten(), strict=True):
        assert (shown.shape, shown.dtype) == (array.shape, array.dtype)
        assert shown.sharding.is_equivalent_to(array.sharding, array.ndim)
    moment = seen.moments.embedding.table.first_moment
    # 6 devices hold 64 in storage as 66; what is seen is split as far as 2, which divides both.
    assert moment.shape == (32, M)
    assert moment.addressable_shards[0].data.shape == (32, M // 2)
    arrays = seen.transform(np.asarray)
    moved = trainings.on_mesh(make_trainer(precision), "data=4", strategy, arrays)
    trainings.assert_same_arrays(moved.state(), arrays)
    one, other = (runtime.train_step(batch(2)).read() for runtime in (split, moved))
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=2e-3)
