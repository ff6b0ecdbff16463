"""Tests gshard-train through its command line: output, user errors, signals and crashes."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lingvo_gshard.tools import train
from lingvo_gshard.tools.console import Console, startup
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.run.loop import Outcome
from lingvo_gshard.wings.cluster.worker_report import REPORT_FILE
from tests.tools.train import tiny_train  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[3]


def run_here(capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    name = "gshard-train"
    code = startup.guarded(name, train.main)([name, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def start(logdir, *flags):
    """Starts a run in a subprocess."""
    command = [sys.executable, "-m", "tests.tools.train.tiny_train", "--experiment=test.tiny"]
    return subprocess.Popen(
        [*command, f"--logdir={logdir}", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(logdir, step):
    for _ in range(6000):
        if (logdir / "metrics.jsonl").exists() and steps_of(logdir)[-1:] >= [step]:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} did not come")


def rows_of(logdir):
    lines = (logdir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def steps_of(logdir):
    return [row["step"] for row in rows_of(logdir)]


def arrays_of(logdir):
    store = CheckpointStore(logdir / "checkpoints", writable=False)
    checkpoint = store.restore()
    store.close()
    return checkpoint.step, {
        **checkpoint.theta,
        "moments": checkpoint.moments["hidden.w.first_moment"],
    }


def test_run_prints_a_summary_and_resumes(tmp_path, capsys):
    code, out, err = run_here(capsys, "--experiment=test.tiny", f"--logdir={tmp_path}")
    assert code == 0
    for words in (
        "test.tiny",
        "101 in all, 101 used by each token",
        "1 CPU",
        "compiled in",
        "step 12/12  loss",
        f"Trained 12 steps; the run is in {tmp_path}",
    ):
        assert words in out, words
    assert steps_of(tmp_path) == list(range(1, 13))
    code, out, err = run_here(
        capsys, "--experiment=test.tiny", f"--logdir={tmp_path}", "--steps=15"
    )
    assert code == 0 and "Resuming from the checkpoint of step 12" in out
    assert steps_of(tmp_path) == list(range(1, 16))


def contents_of(logdir):
    files = (path for path in logdir.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_fewer_steps_than_the_run_has_change_nothing(tmp_path, capsys):
    flags = "--experiment=test.tiny", f"--logdir={tmp_path}"
    run_here(capsys, *flags, "--steps=4")
    before = contents_of(tmp_path)
    for steps in (3, 4):
        code, out, err = run_here(capsys, *flags, f"--steps={steps}")
        assert (code, err) == (0, "")
        # A slow machine says more before.
        assert out.splitlines(keepends=True)[-1] == (
            f"Nothing to do: the run in {tmp_path} has 4 steps already, and run.steps is "
            f"{steps}. To train longer, give a larger --steps.\n"
        )
    assert contents_of(tmp_path) == before


def test_changed_schedule_length_is_a_warning(tmp_path, capsys):
    flags = [
        "--experiment=test.tiny",
        f"--logdir={tmp_path}",
        "--gin_param=step.schedule.total_steps = 0",
    ]
    run_here(capsys, *flags, "--steps=3")
    code, out, err = run_here(capsys, *flags, "--steps=5", "--json")
    assert code == 0
    assert "Warning: the learning rate now decays until step 5, not 3" in err
    record = json.loads(out)
    assert (record["step"], record["finished"]) == (5, True) and "loss" in record["metrics"]


@pytest.mark.slow
def test_killed_run_resumes_bit_for_bit(tmp_path, capsys):
    killed, uninterrupted = tmp_path / "killed", tmp_path / "uninterrupted"
    process = start(killed, "--steps=2000")
    wait_for_step(killed, 21)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    reached = steps_of(killed)[-1]
    steps = reached + 9
    code, out, _ = run_here(
        capsys, "--experiment=test.tiny", f"--logdir={killed}", f"--steps={steps}"
    )
    assert code == 0 and "Resuming from the checkpoint of step" in out
    assert f"of process {process.pid} on " in out and "was stale and is taken over" in out
    code, _, _ = run_here(
        capsys, "--experiment=test.tiny", f"--logdir={uninterrupted}", f"--steps={steps}"
    )
    assert code == 0
    assert steps_of(killed) == list(range(1, steps + 1))
    losses = [[row["loss"] for row in rows_of(logdir)] for logdir in (killed, uninterrupted)]
    assert losses[0] == losses[1]
    (step, mine), (_, theirs) = arrays_of(killed), arrays_of(uninterrupted)
    assert step == steps
    for path in theirs:
        np.testing.assert_array_equal(mine[path], theirs[path])


def test_a_worker_of_an_agent_asks_nobody_to_continue(tmp_path, monkeypatch):
    outcome = Outcome(7, False, "SIGTERM", {"loss": 1.0})
    console, logdir = Console(file=io.StringIO(), width=200), Logdir(tmp_path)
    monkeypatch.setenv(REPORT_FILE, str(tmp_path / "report"))
    train._print_outcome(console, outcome, tiny_train.tiny_experiment(), logdir, "gshard-train ...")
    said = console.file.getvalue()
    assert said == "SIGTERM: saved at step 7; the agents go on from there\n"


# test_signal_watch.py and test_loop.py send the other signals.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_and_prints_how_to_continue(tmp_path, number, capsys):
    process = start(tmp_path, "--steps=100000", "--gin_param=step.clip_norm = 2.0")
    wait_for_step(tmp_path, 3)
    code, _, refused = run_here(capsys, "--experiment=test.tiny", f"--logdir={tmp_path}")
    assert code == 1 and f"is in use by process {process.pid} on " in refused
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert err.count("gshard-train: ") == 1 and "finishing the step and saving" in err
    last = steps_of(tmp_path)[-1]
    assert f": saved at step {last:,}. Continue with:\n  " in out
    command = out.splitlines()[-1].strip()
    assert command.endswith(
        f"--experiment=test.tiny --logdir={tmp_path} --steps=100000 "
        "'--gin_param=step.clip_norm = 2.0'"
    )
    assert arrays_of(tmp_path)[0] == last


@pytest.mark.slow
def test_closed_standard_output_saves_and_says_so_on_standard_error(tmp_path):
    process = start(tmp_path, "--steps=100000", "--gin_param=run.log_every_steps = 1")
    wait_for_step(tmp_path, 3)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 141, err
    last = steps_of(tmp_path)[-1]
    assert "closed standard output: finishing the step and saving\n" in err
    assert f"closed standard output: saved at step {last:,}. Continue with:\n  " in err
    assert "Traceback" not in err
    assert arrays_of(tmp_path)[0] == last


def test_non_finite_step_ends_training(tmp_path, capsys):
    code, out, err = run_here(
        capsys,
        "--experiment=test.tiny",
        f"--logdir={tmp_path}",
        "--gin_param=input.poisoned_batch = 6",
    )
    assert code == 1
    assert err.startswith("gshard-train: error: step 6: ")
    assert "first layer whose output is not finite is hidden" in err
    assert "the last good checkpoint is step 4" in err


def test_a_loss_that_diverges_without_an_infinity_is_said_and_is_no_success(tmp_path, capsys):
    flags = (
        "--experiment=test.tiny",
        f"--logdir={tmp_path}",
        "--gin_param=step.schedule.learning_rate = 1e6",
        "--gin_param=input.splits = ('train',)",
    )
    code, out, err = run_here(capsys, *flags)
    message = "gshard-train: error: the loss diverged at step 5; see the warning above\n"
    assert (code, err) == (1, message)
    assert out.count("the loss has diverged: ") == 1
    assert out.count("Warning: the loss has diverged since step 5: ") == 1
    assert "The likely cause is the learning rate: " in out
    assert "Trained 12 steps" in out
    code, out, err = run_here(capsys, *flags)
    assert (code, err) == (1, message)
    assert out.count("Warning: the loss has diverged since step 5: ") == 1
    assert "Nothing to do: " in out and "the loss has diverged: " not in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--experiment=test.tinny", "--logdir=x"], "'test.tinny'. Did you mean 'test.tiny'?"),
        (["--logdir=x"], "--experiment is missing"),
        (["--experiment=test.tiny"], "--logdir is missing"),
        (["--experiment=test.tiny", "--logdr=x"], "'logdr'. Did you mean: logdir ?"),
        (["--experiment=test.tiny", "--logdir=x", "--steps=0"], "--steps=0"),
        (["--experiment=test.tiny", "--logdir=x", "--steps=many"], "--steps=many"),
        (["--experiment=test.tiny", "--logdir=x", "--runtime=locall"], "Did you mean 'local'?"),
        (
            ["--experiment=test.tiny", "--logdir=x", "--gin_param=trainer.stepps=3"],
            "Did you mean 'run.steps'?",
        ),
        (["--experiment=test.tiny", "--logdir=x", "--gin_file=no.gin"], "no.gin"),
        (["test.tiny"], "'test.tiny' is not a flag"),
        (
            ["--experiment=test.tiny", "--logdir=/dev/null/x"],
            "--logdir=/dev/null/x cannot be written: Not a directory",
        ),
    ],
)
def test_user_errors_are_one_line(flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_here(capsys, *flags)
    assert code == 1
    assert err.startswith("gshard-train: error: ") and err.count("\n") == 1
    assert words in err
    assert not out and not list(tmp_path.iterdir())


def test_run_with_other_params_is_rejected(tmp_path, capsys):
    run_here(capsys, "--experiment=test.tiny", f"--logdir={tmp_path}", "--steps=2")
    code, _, err = run_here(capsys, "--experiment=test.tiny", f"--logdir={tmp_path}", "--seed=5")
    assert code == 1
    assert "step.seed: 1 there, 5 here" in err


def test_list_shows_the_first_line(capsys):
    code, out, _ = run_here(capsys, "--list")
    assert code == 0
    assert "test.tiny\n    Names the largest of six numbers, in a second.\n" in out


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_examples_and_all_flags(flag, capsys):
    with pytest.raises(SystemExit) as exit_:
        train.main(["gshard-train", flag])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "gshard-train --experiment=translation.quickstart --logdir=runs/quickstart" in out
    for name in train.define_flags():
        assert f"--{name}" in out


def test_tensorflows_startup_messages_are_hidden():
    run = subprocess.run(
        [sys.executable, "-m", "lingvo_gshard", "train", "--list"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
