# tests: training/run/checkpoint/choice.py
"""Checks which evaluation counts as the best, and which checkpoint is read."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.training.run.checkpoint.choice import preferred
from lingvo_gshard.training.run.checkpoint.run_item import Best
from lingvo_gshard.training.run.checkpoint.storage import NewestAndBest
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from tests.training.checkpoint.test_store import assert_holds, make_state

VALUES = st.lists(st.floats(0, 9) | st.just(math.nan), min_size=1, max_size=12)


@hypothesis.given(VALUES, st.sampled_from(["dev/loss", "dev/accuracy"]))
def test_best_is_the_first_of_the_best_numbers(values, metric):
    best = Best(metric, values[0], 0)
    for step, value in enumerate(values[1:], 1):
        best = best.after(step, value)
    numbers = [value for value in values if not math.isnan(value)]
    if numbers:
        wanted = max(numbers) if metric == "dev/accuracy" else min(numbers)
        assert (best.value, best.step) == (wanted, values.index(wanted))
    else:
        assert best.step == 0
    assert best.evaluations_since == len(values) - 1 - best.step


def test_newest_and_the_best_are_kept():
    policy = NewestAndBest(2)
    assert policy.kept([1, 2, 3, 4]) == [3, 4]
    policy.best_step = 1
    assert policy.kept([1, 2, 3, 4]) == [1, 3, 4]
    assert policy.kept([1, 2]) == [1, 2]


def save_all(directory, values: dict[int, float], keep: int = 1) -> None:
    store, best = CheckpointStore(directory, keep), None
    for step, value in values.items():
        best = best.after(step, value) if best else Best("dev/loss", value, step)
        store.save(step, make_state(step), {"index": step}, f"name : {step}\n", best=best)
    store.close()


def restored(directory, choice, said=print):
    store = CheckpointStore(directory, say=said, writable=False, choice=choice)
    try:
        return store.restore()
    finally:
        store.close()


def test_best_checkpoint_outlives_newer_ones_and_is_read_first(tmp_path):
    save_all(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5})
    assert preferred(tmp_path, "best") == [2, 4]
    assert_holds(restored(tmp_path, "best"), 2)
    assert_holds(restored(tmp_path, "newest"), 4)
    assert_holds(restored(tmp_path, 4), 4)
    assert_holds(restored(tmp_path, "2"), 2)


def test_new_best_replaces_the_old_one_in_a_later_run(tmp_path):
    save_all(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0})
    store = CheckpointStore(tmp_path, keep=1)
    best = store.peek().record.best.after(4, 0.5)
    for step in (4, 5):
        store.save(step, make_state(step), None, "name : x\n", best=best)
        store.finish()
    store.close()
    assert preferred(tmp_path, "best") == [4, 5]


def test_damaged_best_is_reported_and_the_newest_read(tmp_path):
    save_all(tmp_path, {1: 1.0, 2: 2.0})
    (tmp_path / "1" / "run" / "run.json").write_text("{")
    said = []
    assert_holds(restored(tmp_path, "best", said.append), 2)
    assert said[0].startswith("Warning: the checkpoint of step 1 is damaged")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("worst", "expected best, newest or the step"),
        (7, "=7`: .* has the checkpoints 1, 2"),
    ],
)
def test_checkpoint_that_is_not_there_is_refused(tmp_path, choice, message):
    save_all(tmp_path, {1: 1.0, 2: 2.0})
    with pytest.raises(ValueError, match=message):
        preferred(tmp_path, choice)
