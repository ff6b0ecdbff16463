# tests: tools/experts/__init__.py, tools/experts/prune.py, tools/experts/report.py
# tests: tools/experts/source_run.py, tools/experts/upcycle.py
"""Tests gshard-experts through its command line: report, upcycle and prune."""

import importlib
import json
import re

import numpy as np
import pytest

from lingvo_gshard.api.run import Run, load
from lingvo_gshard.tools import evaluate, experts, train
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.experts import report, source_run
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.wings.evaluation.likelihood import measure_likelihood
from tests.data import corpora
from tests.tools import tiny_translation

DENSE = {
    "--gin_param=task.encoder.moe = @lingvo_gshard.layers.feed_forward.FeedForward",
    "--gin_param=task.decoder.moe_every = 0",
}
STEPS = 20


def run_here(capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    name = "gshard-experts"
    code = startup.guarded(name, experts.main)([name, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def dense_logdir(tmp_path_factory):
    """Returns the directory of a dense model, trained for a few steps."""
    directory = tmp_path_factory.mktemp("dense")
    arguments = tiny_translation.write(directory)
    flags = [*arguments, *DENSE, f"--logdir={directory}/run", f"--steps={STEPS}"]
    train.main(["gshard-train", *flags])
    return directory / "run"


@pytest.fixture(scope="module")
def upcycled_logdir(dense_logdir, tmp_path_factory):
    """Returns the directory of the upcycled model, with three experts in the encoder's layer."""
    logdir = tmp_path_factory.mktemp("upcycled") / "run"
    small = "--gin_param=task.encoder.moe.group_size = 32"
    names = f"--logdir={dense_logdir}", f"--output={logdir}"
    experts.main(["gshard-experts", "upcycle", *names, "--experts=3", small])
    return logdir


def metrics_of(logdir):
    lines = (logdir / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def expectation(logdir):
    """Returns the scores of the test rows by gshard-evaluate."""
    model = load(logdir).model
    return measure_likelihood(model.runtime, model.input, model.input.rows("test"))


def arrays_of(logdir):
    store = CheckpointStore(logdir / "checkpoints", writable=False)
    checkpoint = store.restore()
    store.close()
    return checkpoint


@pytest.mark.slow
def test_upcycled_model_scores_like_the_dense_one(dense_logdir, upcycled_logdir):
    dense, found = map(expectation, (dense_logdir, upcycled_logdir))
    assert found.cross_entropy == pytest.approx(dense.cross_entropy, rel=1e-5)
    assert found.accuracy == pytest.approx(dense.accuracy) and found.tokens == dense.tokens


def test_upcycled_params_describe_the_new_model(dense_logdir, upcycled_logdir):
    dense, found = (Run(path).params for path in (dense_logdir, upcycled_logdir))
    paths = {path for path, _, _ in dense.diff(found)}
    assert paths and all(path.startswith("task.encoder.moe.") for path in paths)
    assert found.task.encoder.moe.group_size == 32 and found.task.encoder.moe.num_experts == 3
    mine, theirs = arrays_of(upcycled_logdir), arrays_of(dense_logdir)
    assert mine.step == theirs.step == STEPS and mine.position == theirs.position
    assert mine.params_text == found.to_text()
    assert {file.name for file in mine.extras.iterdir()} == {
        file.name for file in theirs.extras.iterdir()
    }


@pytest.mark.slow
def test_training_continues_from_an_upcycled_model(upcycled_logdir, tmp_path, capsys):
    train.main(["gshard-train", f"--logdir={upcycled_logdir}", f"--steps={2 * STEPS}"])
    out = capsys.readouterr().out
    assert f"Resuming from the checkpoint of step {STEPS}" in out
    assert "fullest expert" in out and "slots used" in out
    rows = metrics_of(upcycled_logdir)
    assert list(rows) == list(range(STEPS + 1, 2 * STEPS + 1))
    first, last = (
        np.mean([rows[step]["cross_entropy"] for step in steps])
        for steps in (range(STEPS + 1, STEPS + 4), range(2 * STEPS - 2, 2 * STEPS + 1))
    )
    assert last < first
    # Experts started as copies and have diverged.
    w_in = arrays_of(upcycled_logdir).theta["encoder.layers[0].feed_forward.experts.w_in"]
    assert all(np.abs(w_in[0] - other).max() > 1e-4 for other in w_in[1:])


def test_upcycle_restart_begins_at_step_0_with_new_moments(dense_logdir, tmp_path, capsys):
    output = tmp_path / "made" / "run"
    names = f"--logdir={dense_logdir}", f"--output={output}"
    code, out, err = run_here(capsys, "upcycle", *names, "--experts=2", "--restart", "--json")
    assert code == 0
    record = json.loads(out)
    assert (record["logdir"], record["step"], record["experts"]) == (str(output), 0, 2)
    assert record["parameters"] > record["parameters_before"]
    assert f"gshard-train --logdir={output}\n" in err
    found = arrays_of(output)
    assert found.step == 0 and not any(moment.any() for moment in found.moments.values())


def test_report_covers_every_language_and_expert(trained_logdir, tmp_path, capsys):
    json_path, html_path = tmp_path / "experts.json", tmp_path / "experts.html"
    flags = f"--logdir={trained_logdir}", f"--json={json_path}", f"--html={html_path}"
    code, out, err = run_here(capsys, "report", *flags)
    assert (code, err) == (0, "")
    record = json.loads(json_path.read_text())
    assert record["rows"] == 50 and record["split"] == "test" and record["step"] == 20
    layers = record["layers"]
    assert [layer["path"] for layer in layers] == [
        f"{side}.layers[0].feed_forward" for side in ("encoder", "decoder")
    ]
    for layer in layers:
        assert layer["path"] in out and list(layer["languages"]) == ["de", "fr"]
        assert 0 <= layer["languages_differ"] <= 1
        total = np.zeros(layer["num_experts"])
        for language, found in layer["languages"].items():
            load = np.array(found["load"])
            total += load
            assert load.sum() == 2 * found["tokens"]
            assert found["largest_violation"] == pytest.approx(load.max() / load.mean() - 1)
            assert found["dead_experts"] == np.sum(load == 0) and found["dropped_share"] == 0
            assert re.search(rf"{language} +{found['tokens']:,}.*{load.argmax()} \(", out)
        np.testing.assert_array_equal(layer["all"]["load"], total)
        one, other = (np.array(found["load"]) for found in layer["languages"].values())
        common = np.minimum(one / one.sum(), other / other.sum()).sum()
        # German and French are of different families.
        assert layer["family_overlap"]["between"] == pytest.approx(common, abs=1e-6)
        assert layer["family_overlap"]["within"] is None
    # Every row has at least one word and an EOS.
    words = sum(len(row.source.split()) + 1 for row in corpora.rows(50))
    assert layers[0]["all"]["tokens"] >= words
    page = html_path.read_text()
    assert page.count("<td") == 2 * 2 * record["layers"][0]["num_experts"]
    assert "default-src 'none'" in page and "<script" not in page and "http://" not in page


def test_json_is_the_only_standard_output(trained_logdir, capsys):
    flags = f"--logdir={trained_logdir}", "--languages=fr", "--max_rows_per_language=3", "--json"
    code, out, err = run_here(capsys, "report", *flags)
    assert code == 0 and "most used" in err
    record = json.loads(out)
    assert record["rows"] == 3 and list(record["layers"][0]["languages"]) == ["fr"]


def test_heat_map_of_many_experts_has_no_numbers():
    found = {"load": list(range(64)), "largest_violation": 1.0, "dropped_share": 0.0}
    found |= {"dead_experts": 1}
    layer = {"path": "a<b", "num_experts": 64, "languages_differ": 0.5, "all": found}
    record = {"experiment": "x", "step": 1, "rows": 2, "split": "dev"}
    page = report.to_html({**record, "layers": [{**layer, "languages": {"de": found}}]})
    squares = re.findall(r'<td class="s(\d+)" title="de, expert (\d+): ([\d.]+)%"></td>', page)
    assert [int(expert) for _, expert, _ in squares] == list(range(64))
    strengths = [int(strength) for strength, *_ in squares]
    assert strengths == sorted(strengths) and (strengths[0], strengths[-1]) == (0, 20)
    assert "a&lt;b" in page and "a<b" not in page


@pytest.mark.slow
def test_pruned_model_can_be_evaluated(trained_logdir, tmp_path, capsys):
    output = tmp_path / "pruned"
    flags = f"--logdir={trained_logdir}", f"--output={output}", "--split=test", "--languages=de"
    file = tmp_path / "pruned.json"
    code, out, err = run_here(capsys, "prune", *flags, "--keep=0.5", "--by=gate", f"--json={file}")
    assert (code, err) == (0, "")
    assert [len(experts) for experts in json.loads(file.read_text())["experts"].values()] == [4, 4]
    kept = re.findall(r"layers\[0\].feed_forward: 4 of 8 experts, .*: ([\d, ]+)", out)
    assert len(kept) == 2
    original, pruned = arrays_of(trained_logdir), arrays_of(output)
    for side, text in zip(("encoder", "decoder"), kept, strict=True):
        chosen = [int(number) for number in text.split(",")]
        path = f"{side}.layers[0].feed_forward"
        for name, axis in (("experts.w_in", 0), ("router.w_gate", 1)):
            expected = original.theta[f"{path}.{name}"].take(chosen, axis)
            np.testing.assert_array_equal(pruned.theta[f"{path}.{name}"], expected)
    scores = tmp_path / "scores.json"
    flags = "--languages=de", "--max_rows_per_language=4", "--noshuffled", "--beam_size=1"
    evaluate.main(["gshard-evaluate", f"--logdir={output}", *flags, f"--json={scores}"])
    assert json.loads(scores.read_text())["rows"] == 4


def test_keeping_all_experts_changes_nothing(trained_logdir, tmp_path, capsys):
    output = tmp_path / "pruned"
    flags = f"--logdir={trained_logdir}", f"--output={output}", "--split=test", "--keep=1"
    assert run_here(capsys, "prune", *flags)[0] == 0
    original, pruned = arrays_of(trained_logdir), arrays_of(output)
    for mine, theirs in ((pruned.theta, original.theta), (pruned.moments, original.moments)):
        assert mine.keys() == theirs.keys()
        for path in theirs:
            np.testing.assert_array_equal(mine[path], theirs[path])
    assert (output / "params.txt").read_text() == (trained_logdir / "params.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "the subcommand is missing. Valid"),
        (["reprot"], "'reprot' is unknown. Did you mean 'report'?"),
        (["report", "--languages=frr"], "test has no rows of 'frr'. Did you mean 'fr'?"),
        (["report", "--split=tset"], "--split=tset is unknown. Did you mean 'test'?"),
        (["report", "--outptu=x"], "Unknown command line flag 'outptu'"),
        (["prune"], "--output is missing"),
        (["prune", "--output=new", "--keep=0"], "--keep=0; more than 0"),
        (["prune", "--output=new", "--by=laod"], "--by=laod is unknown. Did you mean 'load'?"),
        (["upcycle", "--output=.", "--experts=2"], "--output=. exists already"),
        (["upcycle", "--output=new"], "--experts is missing"),
        (["upcycle", "--output=new", "--experts=1"], "--experts=1; 2 or more"),
        (["upcycle", "--output=new", "--experts=2"], "the task has no dense layers to convert"),
    ],
)
def test_user_errors_are_one_line(flags, words, trained_logdir, capsys):
    if flags:
        flags = [*flags, f"--logdir={trained_logdir}"]
    code, out, err = run_here(capsys, *flags)
    assert code == 1 and out == ""
    assert err.startswith("gshard-experts: error: ") and err.count("\n") == 1
    assert words in err


def test_dense_run_cannot_be_reported_or_pruned(dense_logdir, tmp_path, capsys):
    names = [f"--logdir={dense_logdir}", "--max_rows_per_language=2"]
    code, _, err = run_here(capsys, "report", *names)
    assert code == 1 and "has no experts" in err
    code, _, err = run_here(capsys, "prune", *names, f"--output={tmp_path}/new")
    assert code == 1 and f"--logdir={dense_logdir}: the task has no experts to prune" in err


def test_capacity_that_drops_tokens_must_be_requested(dense_logdir, tmp_path, capsys):
    flags = [f"--logdir={dense_logdir}", f"--output={tmp_path}/new", "--experts=4"]
    flags += ["--gin_param=task.encoder.moe.router.evaluation_capacity_factor = 1.0"]
    code, _, err = run_here(capsys, "upcycle", *flags)
    assert code == 1 and err.count("\n") == 1 and not (tmp_path / "new").exists()
    assert "encoder.moe.router.evaluation_capacity_factor = 4 drops none" in err
    assert "--noexact converts it anyway" in err
    assert run_here(capsys, "upcycle", *flags, "--noexact")[0] == 0


def test_full_disk_leaves_no_output_directory(dense_logdir, tmp_path, capsys, monkeypatch):
    def save(self, step, *_):
        self.say(f"Warning: the checkpoint of step {step} could not be saved")

    monkeypatch.setattr(source_run.CheckpointStore, "save", save)
    names = f"--logdir={dense_logdir}", f"--output={tmp_path}/new"
    code, _, err = run_here(capsys, "upcycle", *names, "--experts=2")
    assert code == 1 and "could not be saved" in err and not (tmp_path / "new").exists()


def test_help_names_the_subcommands(capsys):
    assert experts.main(["gshard-experts", "--help"]) == 0
    out = capsys.readouterr().out
    for subcommand in experts.SUBCOMMANDS:
        assert f"gshard-experts {subcommand} --" in out


@pytest.mark.parametrize("subcommand", experts.SUBCOMMANDS)
def test_help_has_examples_and_all_flags(subcommand, capsys):
    with pytest.raises(SystemExit) as exit_:
        experts.main(["gshard-experts", subcommand, "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert f"gshard-experts {subcommand} --" in out
    for name in importlib.import_module(experts.SUBCOMMANDS[subcommand]).define_flags():
        assert f"--{name}" in out
