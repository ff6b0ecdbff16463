# tests: tools/flags/run.py, api/backend.py
"""Tests the flags of partitioned runs: user errors, and one run from training to translation."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from lingvo_gshard.tools import evaluate, train, translate
from lingvo_gshard.tools.console import startup
from tests.tools import tiny_translation
from tests.tools.standard_input import StandardInput
from tests.tools.train import tiny_train  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[3]
TINY = "--experiment=test.tiny"
TRAINED = "Resuming from the checkpoint of step 4"


def name_of(tool):
    return f"gshard-{tool.__name__.rpartition('.')[2]}"


def run_here(tool, capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    name = name_of(tool)
    code = startup.guarded(name, tool.main)([name, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory):
    """Returns (logdir, flags, output) of a training on eight virtual CPU devices."""
    directory = tmp_path_factory.mktemp("sharded")
    rows = {"input__batch_rows": 8, "task__encoder__moe__group_size": 64}
    flags = tiny_translation.write(directory, **rows, task__decoder__moe_every=0)
    command = [sys.executable, "-m", "lingvo_gshard", "train", *flags]
    command += [f"--logdir={directory}/run", "--steps=4", "--mesh=data=8", "--strategy=expert"]
    # A user's shell sets no number of devices.
    environment = {**os.environ}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr
    return directory / "run", flags, run.stdout


def losses_of(logdir):
    return [json.loads(line)["loss"] for line in (logdir / "metrics.jsonl").open()]


@pytest.mark.slow
def test_training_prints_its_devices(sharded_run):
    logdir, _, out = sharded_run
    assert "8 CPU devices as data=8" in out
    assert "compiled in" in out and "Trained 4 steps" in out
    assert re.search(r"train_step: [\d.]+ MiB per device .*; collectives: .*4 all-to-all", out)
    assert len(losses_of(logdir)) == 4


@pytest.mark.slow
def test_scores_do_not_depend_on_the_mesh(sharded_run, tmp_path, capsys):
    logdir, _, _ = sharded_run
    found = {}
    for name, flags in {
        "local": [],
        "sharded": ["--mesh=data=4,model=2", "--strategy=expert_tensor"],
    }.items():
        path = tmp_path / f"{name}.json"
        flags = [*flags, "--max_rows_per_language=4", "--beam_size=1", "--noshuffled"]
        code, _, err = run_here(evaluate, capsys, f"--logdir={logdir}", f"--json={path}", *flags)
        assert code == 0, err
        found[name] = json.loads(path.read_text())
    assert found["sharded"]["rows"] == found["local"]["rows"] == 8
    for name in ("cross_entropy", "accuracy"):
        assert found["sharded"][name] == pytest.approx(found["local"][name], rel=1e-4), name


@pytest.mark.slow
def test_translation_on_a_mesh(sharded_run, monkeypatch, capsys):
    logdir, _, _ = sharded_run
    lines = b"der Hund sieht Wasser\n\nle chat mange pain\n"
    monkeypatch.setattr(sys, "stdin", StandardInput(lines))
    flags = [f"--logdir={logdir}", "--mesh=data=8", "--strategy=fsdp", "--beam_size=1"]
    code, out, err = run_here(translate, capsys, *flags)
    assert code == 0, err
    assert len(out.splitlines()) == 3 and out.splitlines()[1] == ""


@pytest.mark.slow
def test_run_resumes_in_another_runtime(sharded_run, capsys):
    logdir, flags, _ = sharded_run
    before = losses_of(logdir)
    code, out, err = run_here(
        train, capsys, *flags, f"--logdir={logdir}", "--steps=6", "--runtime=local"
    )
    assert code == 0, err
    assert TRAINED in out and "1 CPU" in out and "Trained 6 steps" in out
    assert losses_of(logdir)[:4] == before and len(losses_of(logdir)) == 6


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mesh=data"], "--mesh=data: 'data'; expected axes with their sizes"),
        (["--mesh="], "--mesh is empty; expected axes"),
        (["--mesh=data=0"], "axis 'data' has size 0"),
        (["--mesh=data=2,data=4"], "axis 'data' is repeated"),
        (["--mesh=data=4,model=4"], "--mesh needs 16 devices, but there are 8"),
        (["--mesh=data=8", "--strategy=exprt"], "unknown strategy 'exprt'. Did you mean 'expert'?"),
        (["--mesh=data=8", "--strategy=expert_tensr"], "'tensr'. Did you mean 'tensor'?"),
        (
            ["--mesh=data=8", "--strategy=tensor"],
            "--strategy=tensor needs axis 'model', which --mesh=data=8 lacks. Valid: data.",
        ),
        (
            ["--mesh=data=4,model=2", "--strategy=B->dta,modle"],
            "needs axis 'dta' and 'modle', which --mesh=data=4,model=2 lacks. Did you mean 'data'?",
        ),
        (["--mesh=data=8", "--strategy=B,Q->data"], "'Q' is not the letter of a dimension"),
        (["--mesh=data=8", "--strategy=wieghts: M->data"], "Did you mean 'weights'?"),
        (["--runtime=spdm"], "--runtime=spdm is unknown. Did you mean 'spmd'?"),
        (["--mesh=data=8", "--partitioner=shard"], "--partitioner=shard is unknown. Did you mean"),
        (
            ["--mesh=data=8", "--device_order=topolgy"],
            "--device_order=topolgy is unknown. Did you mean 'topology'?",
        ),
        (["--mesh=data=8", "--runtime=local"], "--mesh=data=8 needs --runtime=spmd"),
        (["--strategy=fsdp"], "--strategy=fsdp needs --runtime=spmd"),
        (["--partitioner=shardy"], "--partitioner=shardy needs --runtime=spmd"),
        (["--mesh=data=8", "--max_replicated_mb=-1"], "--max_replicated_mb=-1"),
        (
            ["--mesh=data=8", "--gin_param=sharding.overrides = {'task.hidden': 'H->dta'}"],
            "sharding.overrides['task.hidden']=H->dta needs axis 'dta', which --mesh=data=8 lacks. "
            "Did you mean 'data'?",
        ),
        (
            ["--mesh=data=8", "--gin_param=sharding.overrides = {'task.hidden': 'tensor'}"],
            "sharding.overrides['task.hidden']=tensor; expected a table of letters",
        ),
    ],
)
def test_user_errors_are_one_line_and_leave_no_directory(flags, words, capsys, tmp_path):
    jax.devices()
    logdir = tmp_path / "run"
    code, out, err = run_here(train, capsys, TINY, f"--logdir={logdir}", *flags)
    assert code == 1 and out == ""
    assert err.startswith("gshard-train: error: ") and err.count("\n") == 1
    assert words in err
    assert not logdir.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--strategy=fsdp", "--max_replicated_mb=0.0001"],
            "--max_replicated_mb=0.0001: every device would hold",
        ),
        (
            ["--gin_param=sharding.overrides = {'task.hiden': 'H->none'}"],
            "sharding.overrides: no layer or weight is named 'task.hiden'. Did you mean 'hidden'?",
        ),
    ],
)
def test_errors_found_after_building_the_task(flags, words, capsys, tmp_path):
    flags = [TINY, f"--logdir={tmp_path}/run", "--mesh=data=8", *flags]
    code, _, err = run_here(train, capsys, *flags)
    assert code == 1
    assert err.startswith("gshard-train: error: ") and words in err


@pytest.mark.slow
def test_mesh_may_use_a_subset_of_devices(capsys, tmp_path):
    flags = [TINY, f"--logdir={tmp_path}/run", "--mesh=data=3", "--steps=2"]
    code, out, err = run_here(train, capsys, *flags)
    assert code == 0, err
    assert "3 CPU devices as data=3" in out


def test_override_may_name_a_single_weight(capsys, tmp_path):
    flags = [TINY, f"--logdir={tmp_path}/run", "--mesh=data=2,model=2", "--strategy=tensor"]
    overrides = "--gin_param=sharding.overrides = {'hidden.w': 'weights: H->none'}"
    code, _, err = run_here(train, capsys, *flags, overrides, "--steps=2")
    assert code == 0, err


@pytest.mark.parametrize("tool", [evaluate, translate])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mesh=data=4,model=4"], "--mesh needs 16 devices, but there are 8"),
        (["--mesh=data=8", "--strategy=exprt"], "Did you mean 'expert'?"),
        (["--mesh=data=8", "--runtime=local"], "--mesh=data=8 needs --runtime=spmd"),
    ],
)
def test_other_tools_reject_the_same_flags(tool, flags, words, trained_logdir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", StandardInput(b""))
    jax.devices()
    code, out, err = run_here(tool, capsys, f"--logdir={trained_logdir}", *flags)
    assert code == 1 and out == ""
    assert err.startswith(f"{name_of(tool)}: error: ") and err.count("\n") == 1
    assert words in err
