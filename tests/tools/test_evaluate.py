# tests: tools/evaluate.py, wings/evaluation/translation_scores.py
"""Tests gshard-evaluate through its command line."""

import json
import shutil

import pytest
import sacrebleu

from lingvo_gshard.data.sources.row import Row
from lingvo_gshard.tasks.evaluation import perplexity
from lingvo_gshard.tools import evaluate
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.evaluation.translation_scores import choose_rows
from lingvo_gshard.wings.services import progress
from tests.data import corpora


def run_here(capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    name = "gshard-evaluate"
    code = startup.guarded(name, evaluate.main)([name, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def evaluation(trained_logdir, tmp_path_factory):
    """Returns the directory of the files that one full evaluation wrote."""
    directory = tmp_path_factory.mktemp("evaluation")
    files = [f"--json={directory}/scores.json", f"--output={directory}/rows.tsv"]
    evaluate.main(["gshard-evaluate", f"--logdir={trained_logdir}", *files])
    return directory


def test_scores_match_the_written_rows(evaluation):
    record = json.loads((evaluation / "scores.json").read_text(encoding="utf-8"))
    text = (evaluation / "rows.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]
    given = sorted(row[:3] for row in corpora.rows(50))
    assert sorted(tuple(row[:3]) for row in rows) == given
    assert record["rows"] == 50 and record["split"] == "test" and record["step"] == 20
    assert record["experiment"] == "translation.from_files"
    assert list(record["languages"]) == ["de", "fr"]
    for language, found in record["languages"].items():
        mine = [row for row in rows if row[0] == language]
        references = [[row[2] for row in mine]]
        assert found["rows"] == len(mine)
        for column, kind in ((3, "translated"), (1, "copied")):
            hypotheses = [row[column] for row in mine]
            chrf = sacrebleu.corpus_chrf(hypotheses, references).score
            bleu = sacrebleu.corpus_bleu(hypotheses, references).score
            assert found[kind] == {"chrf": chrf, "bleu": bleu}
        assert 0 <= found["shuffled"]["chrf"] <= 100
    assert record["averaged_languages"] == ["de", "fr"]
    assert record["perplexity"] == perplexity(record["cross_entropy"])
    assert 0 < record["cross_entropy"] < 6 and 0 <= record["accuracy"] <= 1
    assert record["rows_too_long"] == 0


@pytest.mark.slow
def test_table_lists_its_settings(trained_logdir, evaluation, capsys):
    code, out, err = run_here(
        capsys,
        f"--logdir={trained_logdir}",
        "--languages=fr",
        # Its programs compile faster than those of a search.
        "--beam_size=1",
        "--max_rows_per_language=19",
        "--noshuffled",
    )
    assert code == 0 and err == ""
    assert "translation.from_files, step 20: 19 rows of test" in out
    assert "No average: no language has 20 rows or more." in out
    assert "shuffled" not in out and "copied" in out and "de " not in out
    for words in ("chrf: sacrebleu nrefs:1", "bleu: sacrebleu nrefs:1", "cross-entropy"):
        assert words in out
    assert out.count("reference") == 5


def test_rows_are_selected_by_language():
    rows = [Row(language, f"{language} {n}", "x") for n in range(30) for language in ("fr", "de")]
    chosen = choose_rows(rows, "test", [], 8)
    assert [row.language for row in chosen] == ["de"] * 8 + ["fr"] * 8
    assert chosen == choose_rows(rows, "test", [], 8)
    assert chosen[8:] == choose_rows(rows, "test", ["fr"], 8)
    assert [row for row in rows if row in chosen and row.language == "de"] == chosen[:8]
    assert len(choose_rows(rows, "test", [], None)) == 60
    assert len(choose_rows(rows, "test", ["de"], 99)) == 30


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--split=tset"], "--split=tset is unknown. Did you mean 'test'?"),
        (["--languages=de,frr"], "--languages: test has no rows of 'frr'. Did you mean 'fr'?"),
        (["--max_rows_per_language=0"], "--max_rows_per_language=0"),
        (["--split=dev"], "dev.tsv:1: wrong number of columns"),
        (["--outptu=x"], "'outptu'. Did you mean: output ?"),
    ],
)
def test_user_errors_are_one_line(flags, words, trained_logdir, capsys, monkeypatch):
    # On a busy machine, loading takes long enough to be shown.
    monkeypatch.setattr(progress, "_SHORTEST_SHOWN", 1e6)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 1e6)
    code, out, err = run_here(capsys, f"--logdir={trained_logdir}", *flags)
    assert code == 1 and out == ""
    assert err.startswith("gshard-evaluate: error: ") and err.count("\n") == 1
    assert words in err


def test_directory_without_a_model_explains_how_to_train_one(trained_logdir, tmp_path, capsys):
    without_checkpoint = tmp_path / "fresh"
    without_checkpoint.mkdir()
    shutil.copy(trained_logdir / "params.txt", without_checkpoint)
    for flags, words in (
        ([], "--logdir is missing"),
        (
            [f"--logdir={tmp_path}/none"],
            "there is no such directory. Train one first: gshard-train",
        ),
        ([f"--logdir={tmp_path}"], "there is no run in it"),
        ([f"--logdir={without_checkpoint}"], "has no checkpoint yet"),
    ):
        code, out, err = run_here(capsys, *flags)
        assert code == 1 and out == ""
        assert err.count("\n") == 1 and words in err


def test_help_shows_examples_and_all_flags(capsys):
    with pytest.raises(SystemExit) as exit_:
        evaluate.main(["gshard-evaluate", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "gshard-evaluate --logdir=runs/quickstart --split=dev --languages=es,de" in out
    for name in evaluate.define_flags():
        assert f"--{name}" in out
