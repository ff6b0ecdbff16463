"""Tests what the training loop tells its observers, and when."""

import pytest
import rich.console

from lingvo_gshard.api.training import train
from lingvo_gshard.training.run.monitoring.step_observer import StepObserver
from tests import tiny


class Recorder(StepObserver):
    """Records its calls; `error` is raised before a step."""

    def __init__(self, idle=(), error=None):
        self.calls = []
        self._idle, self._error = idle, error

    def needs_idle(self, step):
        return step in self._idle

    def before_input(self, step):
        self.calls.append(("input", step))

    def before_step(self, step, batch):
        self.calls.append(("start", step))
        assert sorted(batch) == ["x", "y"]
        if self._error:
            raise self._error

    def after_step(self, step, row):
        self.calls.append(("end", step))
        assert row["loss"] > 0

    def at_end(self):
        self.calls.append("over")


def _train(path, recorder, steps=4, **trainer):
    params = tiny.experiment_params(steps)
    tiny.set_options(params, checkpoint_every_steps=0, evaluate_every_steps=0, **trainer)
    runs = []

    def make(run):
        runs.append(run)
        return recorder

    console = rich.console.Console(quiet=True)
    train(params, path, runtime="local", console=console, observers=[make])
    (run,) = runs
    return run


def test_a_step_ends_after_the_next_one_has_started(tmp_path):
    recorder = Recorder()
    assert _train(tmp_path, recorder, steps=3).first_step == 1
    assert recorder.calls == [
        *[("input", 1), ("start", 1), ("input", 2), ("start", 2), ("end", 1)],
        *[("input", 3), ("start", 3), ("end", 2), ("end", 3), "over"],
    ]


def test_an_idle_step_starts_when_all_earlier_ones_have_ended(tmp_path):
    recorder = Recorder(idle=[3])
    _train(tmp_path, recorder)
    at = recorder.calls.index
    assert at(("end", 2)) < at(("input", 3)) < at(("start", 4)) < at(("end", 3))


def test_a_resumed_run_begins_with_the_next_step(tmp_path):
    _train(tmp_path, Recorder(), steps=2)
    recorder = Recorder()
    assert _train(tmp_path, recorder, steps=3).first_step == 3
    assert recorder.calls[0] == ("input", 3)


def test_results_and_other_work_are_announced(tmp_path):
    recorder = Recorder()
    told = recorder.calls.append
    recorder.before_result = lambda step: told(("result", step))
    recorder.before_other_work = lambda what, limit=None: told((what, limit))
    _train(tmp_path, recorder, steps=2)
    assert recorder.calls[4:] == [
        *[("result", 1), ("end", 1), ("result", 2), ("end", 2)],
        *[("evaluates", None), ("saves a checkpoint", 1800.0), "over"],
    ]


def test_the_end_is_told_after_an_error_too(tmp_path):
    recorder = Recorder(error=RuntimeError("observed"))
    with pytest.raises(RuntimeError, match="observed"):
        _train(tmp_path, recorder)
    assert recorder.calls == [("input", 1), ("start", 1), "over"]
