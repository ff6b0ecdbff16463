# tests: api/run.py, __init__.py, api/experiments.py, api/partitioning.py, api/planning.py
# tests: api/preparation.py, api/saved_run.py, api/training.py, api/options.py
"""Tests the Python API on a small translation model and a small language model."""

import io
import subprocess
import sys

import pytest
import rich.console

import lingvo_gshard as gshard
from lingvo_gshard.core.errors import UserError
from tests.tools.tiny_quickstart import SETTINGS
from tests.tools.train import tiny_train  # noqa: F401

QUIET = rich.console.Console(quiet=True)


def test_importing_the_package_is_light():
    code = (
        "import sys, lingvo_gshard as gshard\n"
        "assert {'train', 'load', 'plan'} <= set(dir(gshard))\n"
        "assert not {'tensorflow', 'jax', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="No lingvo_gshard attribute trian"):
        gshard.trian  # noqa: B018


def test_a_server_reads_vocabularies_without_tensorflow():
    code = (
        "import sys, lingvo_gshard as gshard\n"
        "for name in ('translation.quickstart', 'language_model.quickstart'):\n"
        "    gshard.experiment(name).input.instantiate()\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_batches_too_large_for_any_step_are_refused_before_data_is_read(tmp_path, monkeypatch):
    settings = ["input.batch_rows = 100_000_000", "input.source_length = 100"]
    params = gshard.experiment("translation.quickstart", settings=settings)
    monkeypatch.setattr(params.input.corpus.cls, "__init__", None)
    with pytest.raises(UserError, match=r"10,000,000,000 numbers; .* Lower input\.batch_rows"):
        gshard.train(params, tmp_path / "run", console=QUIET)


def test_every_public_name_is_importable():
    assert {"train", "load", "plan", "verify"} < set(gshard.__all__)
    assert callable(gshard.keras.fit)
    for name in set(gshard.__all__) - {"keras"}:
        assert callable(getattr(gshard, name)), name


def test_experiments_are_found_by_name():
    assert "translation.quickstart" in gshard.experiments()
    params = gshard.experiment("translation.quickstart", settings=["run.steps = 7"])
    assert (params.name, params.run.steps) == ("translation.quickstart", 7)
    with pytest.raises(ValueError, match=r"^`settings` 'trainer.stepps = 7': .*'run.steps'"):
        gshard.experiment("translation.quickstart", settings=["trainer.stepps = 7"])


def test_run_is_trained_resumed_and_opened(tmp_path):
    params = gshard.experiment("test.tiny")
    outcome = gshard.train(params, tmp_path / "run", steps=3, console=QUIET)
    assert (outcome.step, outcome.finished, outcome.signal) == (3, True, None)
    shown = io.StringIO()
    console = rich.console.Console(file=shown)
    again = gshard.train(params, tmp_path / "run", steps=5, console=console)
    assert again.step == 5 and params.run.steps == 12
    assert "Until now" not in shown.getvalue()
    run = gshard.load(tmp_path / "run")
    rows = run.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[2]["loss"] == outcome.metrics["loss"] and rows[4]["loss"] == again.metrics["loss"]
    assert run.step == 5 and run.params.run.steps == 5
    with pytest.raises(UserError, match="has the task TinyTask, which decodes no texts"):
        run.translate(["a"])
    scores = run.evaluate("dev").to_record()
    assert scores["batches"] == 3 and scores["loss"] == pytest.approx(rows[4]["dev/loss"])
    with pytest.raises(UserError, match="TinyTask takes no evaluation option 'languages'"):
        run.evaluate("dev", languages=["de"])
    check_report(run.report(tmp_path / "report.html"), rows)
    assert "test.tiny" in (tmp_path / "report.html").read_text(encoding="utf-8")
    gshard.train(params, tmp_path / "run", steps=6, mesh="data=2", console=console)
    assert "Until now the run had 1 CPU; each start names its mesh" in shown.getvalue()


def check_report(report, rows):
    (found,) = report.runs
    assert (found.experiment, found.history.last_step, found.steps) == ("test.tiny", 5, 5)
    assert found.history.curves.metrics["loss"].mean == pytest.approx(
        [row["loss"] for row in rows], rel=1e-4
    )
    assert [(launch.step, launch.steps) for launch in found.launches] == [(0, 3), (3, 5)]
    assert found.launches[0].devices == "1 CPU" and "python" in found.launches[0].command
    assert [row.scores["batches"] for row in found.evaluations] == [3]
    weights = {row.path for row in found.sharding.tensors if row.kind == "weights"}
    assert {"hidden.w", "output.w"} <= weights
    assert found.history.curves.metrics["host_memory_bytes"].mean[-1] > 2**20
    assert found.recompilations == []


@pytest.mark.slow
def test_training_on_a_mesh_matches_one_device(tmp_path):
    params = gshard.experiment("test.tiny")
    losses = {}
    for mesh in (None, "data=2"):
        logdir = tmp_path / f"{mesh}"
        outcome = gshard.train(params, logdir, steps=2, mesh=mesh, console=QUIET)
        losses[mesh] = outcome.metrics["loss"]
    assert losses["data=2"] == pytest.approx(losses[None], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "data"}, "^`mesh=data`: 'data'; expected axes"),
        ({"mesh": "data=2", "runtime": "local"}, "^`mesh=data=2` needs `runtime=spmd` or"),
    ],
)
def test_invalid_arguments_are_named(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        gshard.train(gshard.experiment("test.tiny"), tmp_path / "run", console=QUIET, **options)
    assert not (tmp_path / "run").exists()


def test_invalid_options_are_named_where_they_are_made():
    with pytest.raises(UserError, match="^`partitioner=shardi` is unknown. Did you mean 'shardy'"):
        gshard.RuntimeOptions(partitioner="shardi")


def test_directory_without_a_run_is_rejected(tmp_path):
    with pytest.raises(UserError, match="^`logdir=.*`: there is no run in it"):
        gshard.load(tmp_path)


@pytest.mark.slow
def test_translation_run_translates(trained_logdir):
    run = gshard.load(trained_logdir)
    texts = run.translate(["der Hund", ""], beam_size=1)
    assert texts == run.translate(["der Hund", ""], gshard.DecodingOptions(beam_size=1))
    assert len(texts) == 2 and texts[1] == ""
    scores = run.evaluate(
        languages=["de"], max_rows_per_language=2, beam_size=1, shuffled=False
    ).to_record()
    assert scores["rows"] == 2 and list(scores["languages"]) == ["de"]
    with pytest.raises(UserError, match="^`languages`: test has no rows of 'dee'"):
        run.evaluate(languages=["dee"])
    assert run.step == 20 and "translation.from_files, step 20" in repr(run)
    with pytest.raises(UserError, match="has the task TranslationTask, which translates"):
        run.generate(["the"])
    with pytest.raises(UserError, match="a list of strings was expected"):
        run.translate("der Hund")


def test_language_model_run_generates(language_model_logdir):
    run = gshard.load(language_model_logdir)
    options = gshard.DecodingOptions(beam_size=1, temperature=1.0, best=2, most_tokens=4)
    found = run.generate(["the dog", "the cat"], options, seed=3)
    assert [len(texts) for texts in found] == [2, 2]
    assert all(text.startswith("the dog") for text in found[0])
    assert found == run.generate(["the dog", "the cat"], options, seed=3)
    assert found != run.generate(["the dog", "the cat"], options, seed=4)


@pytest.mark.slow
def test_experiment_is_planned():
    params = gshard.experiment("translation.quickstart", settings=SETTINGS)
    plan = gshard.plan(params, "cpu:2", mesh="data=2")
    assert plan.fits and plan.name == "translation.quickstart"
    with pytest.raises(UserError, match="^`mesh=data=4`"):
        gshard.plan(params, "cpu:2", mesh="data=4")
