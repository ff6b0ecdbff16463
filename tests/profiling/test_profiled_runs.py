# tests: wings/profiling/observer.py, wings/profiling/profile.py
"""Profiles short training runs and compares them with the host's own clock and with plans."""

import gzip
import json
import os
import pathlib
import subprocess
import sys
import time

import msgspec
import pytest
import rich.console

from lingvo_gshard.api.training import train
from lingvo_gshard.wings.planning.plan.plan import load
from lingvo_gshard.wings.profiling.comparison import Comparison
from lingvo_gshard.wings.profiling.observer import profile_steps
from lingvo_gshard.wings.profiling.profile import INPUT_WAIT, Profile
from lingvo_gshard.wings.profiling.timeline import StepRange
from tests import tiny

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A small version of the quickstart that compiles in seconds.
SETTINGS = (
    "task.model_dim = 16",
    "task.encoder.num_layers = 1",
    "task.encoder.moe_every = 1",
    "task.encoder.moe.group_size = 128",
    "task.decoder.num_layers = 1",
    "task.decoder.moe_every = 0",
    "input.languages = ('gl',)",
    "input.vocabulary.size = 700",
)
FLAGS = (
    "--experiment=translation.quickstart",
    *(f"--gin_param={setting}" for setting in SETTINGS),
)
FOLDER = "profile/plugins/profile/steps_3-5"


def command(*arguments, folder=None):
    """Runs a command in a new process, since jax counts its devices once."""
    result = subprocess.run(
        [sys.executable, "-m", "lingvo_gshard", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def read(logdir):
    return msgspec.json.decode((logdir / FOLDER / "profile.json").read_bytes(), type=Profile)


def assert_adds_up(profile):
    """The parts are from the trace, the time of a step from the host's clock."""
    total = sum(part.seconds for part in profile.parts)
    assert total == pytest.approx(profile.seconds_per_step)
    for row in profile.per_device:
        assert sum(row.seconds.values()) == pytest.approx(profile.seconds_per_step)


def events_of(logdir):
    (path,) = (logdir / FOLDER).glob("*.trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.mark.slow
def test_a_run_on_one_device_and_its_plan(tmp_path):
    plan, again, logdir = tmp_path / "plan.json", tmp_path / "again.json", tmp_path / "run"
    command("plan", *FLAGS, "--topology=cpu:1", f"--json={plan}")
    out = command(
        *("train", *FLAGS, f"--logdir={logdir}", "--steps=6"),
        *("--profile_steps=3:5", f"--plan={plan}", "--runtime=local"),
    )
    for text in ("Profiling steps 3 to 5", "time of a step", "slowest operations", "Largest part"):
        assert text in out
    profile = read(logdir)
    assert_adds_up(profile)
    assert {"products", "attention", "routing and dispatch", "optimizer"} <= {
        part.part for part in profile.parts
    }
    assert len(profile.slowest) == 10
    assert all(row.source.startswith("lingvo_gshard/") for row in profile.slowest if row.layer)
    assert profile.attainable.flops_per_second > profile.useful_rate > 0
    assert 0.8 < profile.executed_flops / profile.useful_flops < 1.5
    layers = {row["args"].get("layer") for row in events_of(logdir) if row["ph"] == "X"}
    assert "encoder/layers_0/self_attention" in layers
    assert list((logdir / FOLDER).glob("*.xplane.pb"))

    found = msgspec.json.decode((logdir / FOLDER / "comparison.json").read_bytes(), type=Comparison)
    assert found.measured == profile.seconds_per_step
    ratios = logdir / FOLDER / "calibration.json"
    out = command("plan", *FLAGS, "--topology=cpu:1", f"--calibration={ratios}", f"--json={again}")
    assert "Note: estimates are calibrated by steps 3:5 of translation.quickstart" in out
    before, after = load(plan), load(again)
    assert after.is_calibrated and not before.is_calibrated
    errors = [abs(p.seconds_per_step - profile.seconds_per_step) for p in (before, after)]
    assert errors[1] < errors[0]
    for row in after.kinds:
        assert row.seconds == pytest.approx(profile.seconds_of(row.kind), rel=1e-6)
    assert after.seconds_per_step_bound == before.seconds_per_step_bound


@pytest.mark.slow
def test_a_run_over_eight_devices(tmp_path):
    out = command(
        *("train", *FLAGS, f"--logdir={tmp_path}", "--steps=6", "--profile_steps=3:5"),
        *("--mesh=data=8", "--strategy=expert"),
    )
    assert "collectives" in out and "exposed" in out
    profile = read(tmp_path)
    assert_adds_up(profile)
    assert [row.device for row in profile.per_device] == list(range(8))
    assert {"all-to-all"} <= {row.kind for row in profile.collectives}
    for row in profile.collectives:
        assert 0 <= row.hidden_seconds <= row.seconds * 1.0001
        assert row.exposed_seconds + row.hidden_seconds <= row.seconds * 1.0001


class SlowInput(tiny.TinyInput):
    """Takes longer to make a batch than the step to use it."""

    def train_batches(self, seed):
        return SlowBatches(super().train_batches(seed))


class SlowBatches:
    """Batches that wait before each."""

    def __init__(self, batches):
        self._batches = batches

    def __getattr__(self, name):
        return getattr(self._batches, name)

    def __next__(self):
        time.sleep(0.2)
        return next(self._batches)


@pytest.mark.slow
def test_the_input_bound_run_of_the_page_is_named_as_such(tmp_path):
    page = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    code = page.partition("```python\n# starved.py\n")[2].partition("```")[0]
    (tmp_path / "starved.py").write_text(code, encoding="utf-8")
    small = [flag for flag in FLAGS if "moe" not in flag and "--experiment" not in flag]
    flags = ("--experiment=starved.experiment", *small, "--logdir=run", "--steps=6")
    out = command("train", *flags, "--profile_steps=3:5", folder=tmp_path)
    assert "Largest part: input wait" in out and "The run is input-bound" in out
    profile = read(tmp_path / "run")
    assert profile.seconds_of(INPUT_WAIT) == pytest.approx(2.0, rel=0.1)


def _profiled(logdir, steps, total, input_=None):
    params = tiny.experiment_params(total)
    if input_:
        params.input = input_.params()
    params.run.set(checkpoint_every_steps=0, evaluate_every_steps=0)
    results = []
    screen = rich.console.Console(quiet=True)
    observers = [profile_steps(steps, results.append)]
    train(params, logdir, runtime="local", console=screen, observers=observers)
    return results


@pytest.mark.slow
def test_an_input_bound_run_is_named_as_such(tmp_path):
    (result,) = _profiled(tmp_path, StepRange(3, 5), 6, SlowInput)
    profile = result.profile
    assert_adds_up(profile)
    assert 0.2 <= profile.seconds_of(INPUT_WAIT) <= profile.seconds_per_step
    assert profile.findings[0].startswith("Largest part: input wait")
    assert "input.prefetch_batches" in profile.findings[1]


@pytest.mark.slow
def test_a_run_that_ends_with_the_profiled_steps(tmp_path):
    (result,) = _profiled(tmp_path, StepRange(3, 4), 4)
    assert (result.profile.first_step, result.profile.last_step) == (3, 4)
    assert result.comparison is None and result.calibration is None
