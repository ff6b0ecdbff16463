# tests: tools/flags/planned.py, wings/planning/planned_training.py
"""Plans and searches, and trains with the files: gshard-plan --json, then gshard-train --plan."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.core.config.params_text import experiment_from_text
from lingvo_gshard.tools import inspect, plan, train, verify
from lingvo_gshard.tools.console import startup
from lingvo_gshard.training.run.logdir import Logdir
from tests.tools.tiny_quickstart import SETTINGS
from tests.tools.train import tiny_train  # noqa: F401

TINY = "--experiment=test.tiny"


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def run(capsys, tool, *flags):
    """Returns the output of a command that succeeds."""
    capsys.readouterr()
    code = startup.guarded(tool.NAME, tool.main)([tool.NAME, *map(str, flags)])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def losses_of(logdir):
    return [json.loads(line)["loss"] for line in (logdir / "metrics.jsonl").open()]


def saved(logdir):
    return Logdir(logdir).read_params()


@pytest.mark.slow
def test_a_plan_is_trained_resumed_and_inspected(tmp_path, capsys):
    path, logdir, by_flags = tmp_path / "plan.json", tmp_path / "run", tmp_path / "flags"
    sharding = "--mesh=data=4,model=2", "--strategy=data_tensor", "--partitioner=shardy"
    setting = "--gin_param=step.micro_batches = 2"
    run(capsys, plan, TINY, "--topology=cpu:8", *sharding, setting, f"--json={path}")

    out = run(capsys, train, f"--plan={path}", f"--logdir={logdir}", "--steps=4")
    assert "test.tiny" in out and "8 CPU devices as data=4,model=2" in out
    assert "Not as planned" not in out and "Warning: planned" not in out
    run(capsys, train, TINY, *sharding, setting, f"--logdir={by_flags}", "--steps=4")
    assert losses_of(logdir) == losses_of(by_flags)
    params = saved(logdir)
    assert params.step.micro_batches == 2 and params.sharding.partitioner == "shardy"
    assert params.sharding.mesh == "data=4,model=2" and params.sharding.strategy == "data_tensor"

    # Resuming needs no plan, and a plan does not change what resumes.
    out = run(capsys, train, f"--logdir={logdir}", "--steps=6")
    assert "Resuming from the checkpoint of step 4" in out and "as data=4,model=2" in out
    assert saved(logdir).sharding == params.sharding
    out = run(capsys, train, f"--plan={path}", f"--logdir={logdir}", "--steps=8")
    assert "Resuming from the checkpoint of step 6" in out

    assert "data=4,model=2" in run(capsys, inspect, f"--plan={path}")
    assert "equal" in run(capsys, verify, f"--plan={path}")


def test_equal_flags_and_other_settings_beside_a_plan(tmp_path, capsys):
    path, logdir = tmp_path / "plan.json", tmp_path / "run"
    run(capsys, plan, TINY, "--topology=cpu:2", "--strategy=data", f"--json={path}")
    flags = f"--plan={path}", TINY, "--mesh=data=2", "--strategy=data", f"--logdir={logdir}"
    changes = "--gin_param=step.clip_norm = 0.5", "--gin_param=run.log_every_steps = 2"
    out = run(capsys, train, *flags, *changes, "--steps=2")
    assert "Not as planned: step.clip_norm is 0.5, planned with 1.0" in out
    assert out.count("Not as planned") == 1
    assert saved(logdir).step.clip_norm == 0.5 and saved(logdir).run.steps == 2


def test_a_plan_of_one_device_may_run_locally(tmp_path, capsys):
    path = tmp_path / "plan.json"
    run(capsys, plan, TINY, "--topology=cpu:1", "--strategy=data", f"--json={path}")
    flags = f"--plan={path}", f"--logdir={tmp_path}/run", "--steps=2"
    assert "1 CPU" in run(capsys, train, *flags, "--runtime=local")


def check_found(capsys, directory, name, settings, *flags):
    """Searches, trains some steps with what was found, and checks that exactly this is trained."""
    path, logdir = directory / "found.json", directory / "run"
    given = [f"--experiment={name}", *(f"--gin_param={each}" for each in settings)]
    out = run(capsys, plan, *given, "--topology=cpu:8", "--search", *flags, f"--json={path}")
    assert f"gshard-train --plan={path}" in out
    record = json.loads(path.read_text())
    best = record["best"]
    out = run(capsys, train, f"--plan={path}", f"--logdir={logdir}", "--steps=3")
    assert f"8 CPU devices as {best['mesh']}" in out
    losses = losses_of(logdir)
    assert len(losses) == 3 and losses[0] > 0

    trained = saved(logdir)
    planned = experiment_from_text(record["params"])
    planned.run.steps = 3
    assert trained.to_text() == planned.to_text()
    assert dict(best["overrides"]) == trained.sharding.overrides
    assert trained.sharding.strategy == best["strategy"]
    assert trained.step.micro_batches == best["micro_batches"]
    policies = {v for path, v in trained.leaves() if path.endswith(".rematerialize")}
    assert policies == {best["rematerialize"]}
    # The flags that the search prints give the same training.
    by_flags = directory / "flags"
    run(capsys, train, *given, *best["flags"], f"--logdir={by_flags}", "--steps=3")
    assert losses_of(by_flags) == losses
    return record


@pytest.mark.slow
@hypothesis.settings(
    max_examples=3,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    moe_every=st.sampled_from([0, 1, 2]),
    layers=st.integers(1, 2),
    rows=st.sampled_from([8, 16, 24]),
    model_dim=st.sampled_from([16, 32]),
    compilations=st.integers(0, 1),
)
def test_what_is_found_is_trained(
    tmp_path_factory, capsys, moe_every, layers, rows, model_dim, compilations
):
    settings = (
        *SETTINGS,
        "input.languages = ('gl', 'pt')",
        "input.vocabulary.size = 700",
        f"task.model_dim = {model_dim}",
        f"task.encoder.num_layers = {layers}",
        f"task.encoder.moe_every = {moe_every}",
        f"input.batch_rows = {rows}",
    )
    directory = tmp_path_factory.mktemp("found")
    compiled = f"--search_compilations={compilations}"
    check_found(capsys, directory, "translation.quickstart", settings, compiled)


@pytest.mark.slow
def test_a_language_model_with_experts_is_found_and_trained(tmp_path, capsys):
    settings = (
        *("task.model_dim = 16", "task.decoder.num_layers = 2", "task.decoder.hidden_dim = 32"),
        *("task.decoder.moe.group_size = 32", "input.vocabulary.size = 700"),
        *("input.batch_rows = 16", "input.length = 32"),
    )
    record = check_found(
        capsys,
        tmp_path,
        "language_model.quickstart",
        settings,
        *("--search_compilations=1", "--search_precision=float32", "--search_precision=bfloat16"),
    )
    choices = {row["choice"] for row in record["explanation"]}
    assert {"micro_batches", "dispatch", "precision"} <= choices
    rows = [row for row in record["explanation"] if row["choice"] == "dispatch"]
    assert [row["is_compiled"] for row in rows] == [True]
