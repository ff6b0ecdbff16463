# tests: core/signals.py, tools/console/process_start.py
"""Tests that a command answers signals at once: with one line, the right code, and nothing lost."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from lingvo_gshard.core.signals import REPEAT_SECONDS, handled_signals

ROOT = pathlib.Path(__file__).resolve().parents[3]

# A command that works in C.
BUSY = """
import ctypes, sys
from lingvo_gshard.tools.console.process_start import SignalWatch
from lingvo_gshard.core.signals import State, called_before_abrupt_end

class Training:
    finishing = {finishing}

with SignalWatch("gshard-test"):
    {setup}
    with called_before_abrupt_end(lambda: print("cleaned up", flush=True)):
        print("ready", flush=True)
        for _ in range(20):  # Each signal interrupts one of them.
            ctypes.CDLL(None).sleep(30)
"""

# The console script of gshard-train, which says when it watches signals.
CONSOLE_SCRIPT = """
import sys
from lingvo_gshard.tools.console import entry
from lingvo_gshard.tools.console.process_start import SignalWatch

class Watch(SignalWatch):
    def __enter__(self):
        super().__enter__()
        print("watched", file=sys.stderr, flush=True)

entry.SignalWatch = Watch
entry.run_script()
"""
EXPERIMENT = '''
from lingvo_gshard.core.config import registry

@registry.register("mine.tiny")
def tiny_experiment():
    """Trains in a second."""
    from tests import tiny
    return tiny.experiment_params()
'''


def start(setup="pass", finishing=False):
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.format(setup=setup, finishing=finishing)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGINT, "Ctrl-C", 130),
        (signal.SIGTERM, "SIGTERM", 143),
        (signal.SIGHUP, "SIGHUP", 129),
    ],
)
def test_signal_ends_a_command_at_once_with_one_line(number, name, code):
    process = start()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, "cleaned up\n")
    assert err == f"gshard-test: stopped by {name}\n"


def test_signal_before_the_first_step_says_so():
    process = start("State.training = Training")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert err == "gshard-test: SIGTERM: stopped before the first step; nothing is lost\n"


def test_first_signal_during_training_is_said_and_the_second_ends_it():
    process = start("State.training = Training", finishing=True)
    process.send_signal(signal.SIGINT)
    said = process.stderr.readline() + process.stderr.readline()
    assert said == (
        "\ngshard-test: Ctrl-C: finishing the step and saving. "
        "Repeat after 2 s to quit without saving\n"
    )
    # Signals of the first seconds belong to the first one.
    for _ in range(5):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    time.sleep(REPEAT_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (129, "cleaned up\n")
    assert err == "gshard-test: SIGHUP: ended at once, without saving\n"


def test_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert handled_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in handled_signals()


def wait_for_rows(path, process):
    """Waits until a run has written the metrics of a step, however slow the machine is."""
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_at_any_time_of_the_start_is_one_line(tmp_path, number):
    """From the first line of the program, through imports and compilation, to the end of a step."""
    script = tmp_path / "gshard-train"
    script.write_text(CONSOLE_SCRIPT)
    (tmp_path / "mine.py").write_text(EXPERIMENT)
    codes, said = set(), set()
    for tenths in (*range(0, 120, 5), None):
        logdir = tmp_path / f"run{tenths}"
        process = subprocess.Popen(
            [sys.executable, script, "--experiment=mine.tiny", f"--logdir={logdir}"]
            + ["--steps=1000000"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert process.stderr.readline() == "watched\n"
        if tenths is None:
            wait_for_rows(logdir / "metrics.jsonl", process)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(tenths / 10)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        codes.add(process.returncode)
        lines = err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("gshard-train: "), (tenths, err)
        assert not (logdir / "run.lock").exists()
        said.add(lines[0].rpartition(": ")[2].partition(" ")[0])
        if "saving" in lines[0]:
            assert "saved at step" in out and list((logdir / "checkpoints").iterdir())
    assert codes == {128 + number}
    assert {"stopped", "finishing"} <= said
