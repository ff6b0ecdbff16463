# tests: training/run/checkpoint/choice.py, training/run/loop.py, wings/services/dev_evaluation.py
"""Checks that a run keeps its best checkpoint, and ends when it no longer gets better."""

import os

import pytest

from lingvo_gshard.training.run.checkpoint.choice import preferred
from tests.training.test_loop import Run, assert_equal_runs

SETTINGS = {
    "evaluate_every_steps": 2,
    "checkpoint_every_steps": 0,
    "keep_checkpoints": 1,
    "keep_best": "dev/loss",
}


class WorseInTime:
    """An input whose dev split is about other labels after so many evaluations."""

    def __init__(self, input_, evaluations: int):
        self._input, self._left = input_, evaluations

    def __getattr__(self, name):
        return getattr(self._input, name)

    def evaluation_batches(self, split):
        self._left -= 1
        batches = self._input.evaluation_batches(split)
        if self._left >= 0:
            return batches
        return [{**batch, "y": (batch["y"] + 1) % 4} for batch in batches]


def go(directory, evaluations: int, **settings):
    """Runs with a dev split that changes after some evaluations; two read it before training."""
    run = Run(directory, wrap=lambda input_: WorseInTime(input_, evaluations + 2), **settings)
    return run, run.go()


def test_best_checkpoint_is_kept_and_read(tmp_path):
    run, outcome = go(tmp_path, 3, **SETTINGS)
    assert outcome.finished
    values = {row["step"]: row["dev/loss"] for row in run.rows() if "dev/loss" in row}
    assert min(values, key=values.get) == 6
    assert preferred(tmp_path / "checkpoints", "best") == [6, 12]
    assert f"The best dev/loss is {values[6]:.4f}, of step 6" in run.screen.getvalue()


def test_patience_ends_the_training_once_and_for_all(tmp_path):
    run, outcome = go(tmp_path, 3, **SETTINGS, patience=2)
    assert (outcome.step, outcome.finished, outcome.signal) == (10, True, None)
    assert "Training ends: 2 evaluations since were not better" in run.screen.getvalue()
    assert preferred(tmp_path / "checkpoints", "best") == [6, 10]


@pytest.mark.slow
def test_resumed_run_remembers_its_best(tmp_path):
    whole, _ = go(tmp_path / "whole", 3, **SETTINGS)
    stop = lambda n: n == 7 and os.kill(os.getpid(), 15)  # noqa: E731
    go(tmp_path / "parts", 3, **SETTINGS, on_batch=stop)
    resumed, _ = go(tmp_path / "parts", 0, **SETTINGS)
    assert preferred(tmp_path / "parts" / "checkpoints", "best") == [6, 12]
    assert_equal_runs(resumed, whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_best": "loss"}, "keep_best='loss': expected a metric of the dev split"),
        ({"keep_best": "dev/los"}, "'dev/los' is no metric of the dev split. Did you mean 'dev/l"),
        ({"evaluate_every_steps": 0}, "needs run.evaluate_every_steps, which is 0"),
        ({"keep_best": "", "patience": 3}, "run.patience=3 needs run.keep_best"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_training(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        go(tmp_path, 9, **{**SETTINGS, **settings})
    assert not (tmp_path / "metrics.jsonl").exists() or not Run(tmp_path).rows()
