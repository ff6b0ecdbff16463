# tests: training/run/loop.py, api/training.py, training/run/options.py, training/run/saving.py
# tests: wings/services/dev_evaluation.py, training/run/checkpoint/storage.py
"""Tests complete runs: resuming equals no interruption, and every ending leaves a usable run."""

import errno
import io
import json
import os
import re
import signal
import time

import numpy as np
import pytest
import rich.console

from lingvo_gshard.api.training import train
from lingvo_gshard.core.signals import StopRequest
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.run.loop import TrainingLoop
from lingvo_gshard.training.run.monitoring.metrics import MEASURED
from lingvo_gshard.training.run.monitoring.step_observer import ObservedRun, StepObserver
from lingvo_gshard.wings.services.divergence import NonFiniteError
from tests import tiny


class Run:
    """Runs the tiny experiment; `screen` holds its output."""

    def __init__(self, path, steps=12, on_batch=None, wrap=None, **trainer):
        self.params = tiny.experiment_params(steps)
        tiny.set_options(self.params, **trainer)
        self.logdir = Logdir(path)
        self.screen = io.StringIO()
        self.on_batch, self.wrap = on_batch, wrap

    def go(self):
        with self.logdir.claim(self.params):
            return self._go()

    def _go(self):
        self.params.run.instantiate()
        console = rich.console.Console(file=self.screen, width=200)
        trainer = self.params.step.instantiate(self.params.task, self.params.run.steps)
        self.runtime = SingleDeviceRuntime(trainer)
        store = CheckpointStore(
            self.logdir.checkpoints, self.params.run.keep_checkpoints, self._say
        )
        input_ = self.params.input.instantiate()
        if self.on_batch:
            input_ = Watched(input_, self.on_batch)
        if self.wrap:
            input_ = self.wrap(input_)
        try:
            with StopRequest() as stop:
                checkpoint = store.restore()
                step = checkpoint.step if checkpoint else 0
                made_of = self.params, trainer, self.runtime, None, input_, self.logdir
                run = ObservedRun(*made_of, store, stop, step + 1, console)
                return TrainingLoop(run).run(checkpoint)
        finally:
            store.close()

    def _say(self, text):
        self.screen.write(text + "\n")

    def rows(self):
        lines = (self.logdir.path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def arrays(self):
        store = CheckpointStore(self.logdir.checkpoints, writable=False)
        checkpoint = store.restore()
        store.close()
        return {**checkpoint.theta, **{f"moment {k}": v for k, v in checkpoint.moments.items()}}


class Watched:
    """An input that calls `on_batch(number)` before it hands out a training batch."""

    def __init__(self, input_, on_batch):
        self._input, self._on_batch = input_, on_batch

    def __getattr__(self, name):
        return getattr(self._input, name)

    def train_batches(self, seed):
        batches = self._input.train_batches(seed)
        plain, on_batch = type(batches).__next__, self._on_batch

        class WatchedBatches(type(batches)):
            def __next__(self):
                on_batch(self._index + 1)
                return plain(self)

        batches.__class__ = WatchedBatches
        return batches


def without_speed(rows):
    return [{k: v for k, v in row.items() if k not in MEASURED} for row in rows]


def assert_equal_runs(one, other):
    assert without_speed(one.rows()) == without_speed(other.rows())
    mine, theirs = one.arrays(), other.arrays()
    assert mine.keys() == theirs.keys()
    for path in mine:
        np.testing.assert_array_equal(mine[path], theirs[path])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of twelve steps that nothing interrupted."""
    run = Run(tmp_path_factory.mktemp("whole"))
    outcome = run.go()
    assert (outcome.step, outcome.finished, outcome.signal) == (12, True, None)
    return run


def test_logdir_has_a_metrics_row_for_each_step(whole):
    rows = whole.rows()
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert row["loss"] == np.float32(row["loss"])
        assert row["perplexity"] == pytest.approx(np.exp(row["cross_entropy"]))
        assert {"accuracy", "gradient_norm", "learning_rate", "hidden_mean"} <= row.keys()
    assert "dev/loss" in rows[-1] and "dev/loss" not in rows[0]
    assert whole.logdir.params.exists()
    assert list((whole.logdir.path / "events").iterdir())
    assert sorted(os.listdir(whole.logdir.checkpoints)) == ["12", "4", "8"]


def test_output_without_a_terminal_is_plain_lines(whole):
    lines = whole.screen.getvalue().splitlines()
    starts = [line.split("  ")[0] for line in lines]
    assert starts[:6] == ["compiling", "step 1", "step 5/12", "step 10/12", "step 12/12", "step 12"]
    assert "compiled in" in lines[1]
    for part in ("loss ", "tokens/s", "steps/s", "left"):
        assert part in lines[3]
    assert "dev: loss" in lines[5]
    *compiled, saving = [start.split(":")[0] for start in starts[6:]]
    assert compiled == ["compiled train", "compiled eval"]
    assert re.fullmatch(r"Saving kept the steps waiting for [\d.]+% of the time", saving)


@pytest.mark.parametrize(
    "steps", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)]
)
def test_resumed_run_equals_an_uninterrupted_one(whole, tmp_path, steps):
    Run(tmp_path, steps).go()
    resumed = Run(tmp_path)
    resumed.go()
    rows = resumed.rows()
    # The shorter run's last step evaluated, as every last step does.
    assert "dev/loss" in rows[steps - 1]
    rows[steps - 1] = {k: v for k, v in rows[steps - 1].items() if not k.startswith("dev/")}
    assert without_speed(rows) == without_speed(whole.rows())
    mine, theirs = resumed.arrays(), whole.arrays()
    for path in theirs:
        np.testing.assert_array_equal(mine[path], theirs[path])


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_signal_finishes_the_step_and_saves(whole, tmp_path, number):
    stopped = Run(tmp_path, on_batch=lambda n: n == 6 and os.kill(os.getpid(), number))
    outcome = stopped.go()
    assert (outcome.step, outcome.finished) == (6, False)
    assert outcome.signal == {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[number]
    assert [row["step"] for row in stopped.rows()] == list(range(1, 7))
    assert "6" in os.listdir(tmp_path / "checkpoints")
    resumed = Run(tmp_path)
    assert resumed.go().finished
    assert_equal_runs(resumed, whole)


def test_crashed_run_resumes_from_the_last_checkpoint(whole, tmp_path):
    def die(number):
        if number == 11:
            raise MemoryError

    with pytest.raises(MemoryError):
        Run(tmp_path, on_batch=die).go()
    resumed = Run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "lo')
    resumed.go()
    assert_equal_runs(resumed, whole)


def test_damaged_newest_checkpoint_loses_only_its_steps(whole, tmp_path):
    Run(tmp_path, 10).go()
    (tmp_path / "checkpoints" / "10" / "run" / "run.json").write_text("{")
    resumed = Run(tmp_path)
    resumed.go()
    assert "the checkpoint of step 10 is damaged" in resumed.screen.getvalue()
    assert_equal_runs(resumed, whole)


def test_resuming_a_finished_run_does_nothing(whole):
    before = whole.rows()
    again = Run(whole.logdir.path)
    outcome = again.go()
    assert (outcome.step, outcome.finished) == (12, True)
    assert again.rows() == before


def test_non_finite_step_names_step_and_layer(tmp_path):
    run = Run(tmp_path)
    run.params.input.poisoned_batch = 10
    with pytest.raises(NonFiniteError) as caught:
        run.go()
    message = str(caught.value)
    assert message.startswith("step 10: ")
    assert "the first layer whose output is not finite is hidden;" in message
    assert "the last good checkpoint is step 8. Likely to help: a lower step.schedule" in message
    assert [row["step"] for row in run.rows()] == list(range(1, 10))
    assert all(np.isfinite(value).all() for value in run.arrays().values())


def test_dev_loss_is_evaluated_on_schedule_and_changes_nothing(whole, tmp_path):
    run = Run(tmp_path, evaluate_every_steps=5)
    run.go()
    assert [row["step"] for row in run.rows() if "dev/loss" in row] == [5, 10, 12]
    mine, theirs = run.arrays(), whole.arrays()
    for path in theirs:
        np.testing.assert_array_equal(mine[path], theirs[path])


@pytest.mark.slow
def test_evaluation_that_a_signal_cut_short_is_made_up_for(whole, tmp_path):
    Run(
        tmp_path, evaluate_every_steps=6, on_batch=lambda n: n == 6 and os.kill(os.getpid(), 15)
    ).go()
    assert "dev/loss" not in Run(tmp_path).rows()[-1]
    resumed = Run(tmp_path, evaluate_every_steps=6)
    resumed.go()
    undisturbed = Run(tmp_path / "undisturbed", evaluate_every_steps=6)
    undisturbed.go()
    assert [row["step"] for row in undisturbed.rows() if "dev/loss" in row] == [6, 12]
    assert_equal_runs(resumed, undisturbed)


def test_rows_that_waited_for_space_are_written_before_a_checkpoint(tmp_path, monkeypatch):
    write, full, rows_at_save = os.write, [], {}

    def write_if_possible(file, data):
        # The disk has space again by the second attempt to write the row of step 4.
        if data.startswith(b'{"step":4') and not full:
            full.append(data)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    save, run = CheckpointStore.save, Run(tmp_path)

    def save_and_count(store, step, *rest):
        rows_at_save[step] = len(run.rows())
        save(store, step, *rest)

    monkeypatch.setattr(os, "write", write_if_possible)
    monkeypatch.setattr(CheckpointStore, "save", save_and_count)
    run.go()
    assert full and rows_at_save == {4: 4, 8: 8, 12: 12}


def test_training_on_a_full_disk_continues_and_ends_with_an_error(tmp_path, monkeypatch):
    from lingvo_gshard.training.run.checkpoint import storage as checkpoint

    usage = checkpoint.shutil.disk_usage("/")
    run = Run(tmp_path, on_batch=lambda n: n == 5 and full.append(1))
    full: list[int] = []
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=0) if full else usage
    )
    with pytest.raises(OSError, match=r"step 12 could not be saved\. .* from step 4"):
        run.go()
    assert len(run.rows()) == 12
    assert "step 8 could not be saved (no space left" in run.screen.getvalue()
    assert os.listdir(tmp_path / "checkpoints") == ["4"]


def test_compiles_once_per_function(tmp_path):
    run = Run(tmp_path, evaluate_every_steps=3)
    run.go()
    assert len(run.runtime.compilations) == 2


def test_unreadable_dev_split_is_reported_before_training(tmp_path):
    run = Run(tmp_path)
    run.params.input.unreadable = ("dev",)
    with pytest.raises(ValueError, match=r"dev\.tsv:3: no three columns"):
        run.go()
    assert not run.runtime.compilations


def test_no_dev_loss_without_a_dev_split(whole, tmp_path):
    run = Run(tmp_path)
    run.params.input.splits = ("train",)
    assert run.go().finished
    names = {name for row in run.rows() for name in row}
    assert not any(name.startswith("dev/") for name in names)
    assert any(name.startswith("dev/") for row in whole.rows() for name in row)


class Mover(StepObserver):
    """Moves a run's directory before a step, once the checkpoint of two steps ago is complete."""

    def __init__(self, source, target, step):
        self._source, self._target, self._step = source, target, step

    def before_step(self, step, batch):
        if step == self._step:
            while not (self._source / "checkpoints" / str(step - 2) / "run" / "run.json").exists():
                time.sleep(0.05)
            self._source.rename(self._target)


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_directory_that_is_moved_away_ends_the_run(tmp_path, log_every):
    """A fresh directory of the old name would hold half a run: metrics go to the moved files."""
    params = tiny.experiment_params(12)
    params.run.set(checkpoint_every_steps=2, evaluate_every_steps=0, log_every_steps=log_every)
    old, new = tmp_path / "run", tmp_path / "moved"
    console = rich.console.Console(quiet=True)
    words = r"run was moved or deleted while .*; steps 5 to \d+ are lost\. .* resumes from step 4"
    with pytest.raises(OSError, match=words):
        observers = [lambda _: Mover(old, new, 6)]
        train(params, old, runtime="local", console=console, observers=observers)
    assert not old.exists()
    # The lock of a process that has ended is stale; this one lives.
    (new / "run.lock").unlink()
    outcome = train(params, new, runtime="local", console=console)
    assert outcome.step == 12
    steps = [json.loads(line)["step"] for line in (new / "metrics.jsonl").open()]
    assert steps == sorted(set(steps))
