# tests: tools/evaluate.py, wings/evaluation/text_scores.py
"""Tests gshard-evaluate on a language model."""

import importlib.util
import json
import math
import sys

import pytest

from lingvo_gshard.tasks.evaluation import perplexity
from lingvo_gshard.tools import evaluate, translate
from lingvo_gshard.tools.console import startup
from tests.tools.standard_input import StandardInput

# One process runs all tests of this file, so that they share their fixtures.
pytestmark = pytest.mark.xdist_group("language_model_logdir")


@pytest.fixture(scope="module")
def logdir(language_model_logdir):
    return language_model_logdir


def run_here(capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    name = "gshard-evaluate"
    code = startup.guarded(name, evaluate.main)([name, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_training_learns_and_evaluates_the_dev_split(logdir):
    rows = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 30
    assert rows[-1]["cross_entropy"] < 0.9 * rows[0]["cross_entropy"]
    assert rows[-1]["dev/perplexity"] < 280
    assert "decoder.layers[0].feed_forward/auxiliary_loss" in rows[-1]


def test_evaluation_prints_a_table_and_writes_json(logdir, tmp_path, capsys):
    flags = [f"--logdir={logdir}", "--split=dev", f"--json={tmp_path}/scores.json"]
    code, out, err = run_here(capsys, *flags)
    assert code == 0 and err == ""
    assert "language_model.from_files, step 30: 10 documents of dev" in out
    for words in ("bits per byte", "perplexity per token", "nats per token"):
        assert words in out
    record = json.loads((tmp_path / "scores.json").read_text())
    assert record["split"] == "dev" and record["step"] == 30 and record["documents"] == 10
    nats = record["cross_entropy"] * record["tokens"]
    assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / record["bytes"])
    assert record["perplexity_per_word"] == pytest.approx(math.exp(nats / record["words"]))
    assert record["perplexity"] == perplexity(record["cross_entropy"])
    # Training evaluated to the same loss after its last step.
    last = json.loads((logdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["cross_entropy"] == pytest.approx(last["dev/cross_entropy"], rel=1e-5)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--languages=de",
            "--languages=de does not apply to LanguageModelTask, the task of language_model",
        ),
        ("--max_rows_per_language=3", "--max_rows_per_language=3 does not apply to"),
        ("--noshuffled", "--noshuffled does not apply to"),
        ("--output=x", "--output=x does not apply to"),
        ("--beam_size=2", "--beam_size=2 does not apply to"),
        ("--length_exponent=0", "--length_exponent=0.0 does not apply to"),
        ("--split=tset", "--split=tset is unknown. Did you mean 'test'?"),
    ],
)
def test_user_errors_are_one_line(flag, words, logdir, capsys):
    code, out, err = run_here(capsys, f"--logdir={logdir}", flag)
    assert code == 1 and out == ""
    assert err.startswith("gshard-evaluate: error: ") and err.count("\n") == 1
    assert words in err


def test_translating_with_a_language_model_is_an_error(logdir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", StandardInput(b""))
    code = startup.guarded("gshard-translate", translate.main)(
        ["gshard-translate", f"--logdir={logdir}"]
    )
    assert code == 1
    assert "LanguageModelTask, which continues texts (gshard-generate)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tasks=arc_easy", "--split=dev"], "--split=dev has no effect on --tasks"),
        (["--tasks=arc_easy", "--beam_size=2"], "--beam_size=2 has no effect on --tasks"),
        (["--limit=5"], "--limit=5 needs --tasks"),
        (["--tasks=arc_easy"], "pip install lm-eval"),
    ],
)
def test_flags_of_tasks_are_checked(logdir, capsys, monkeypatch, flags, words):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: name != "lm_eval" and found(name, *rest)
    )
    code, _, err = run_here(capsys, f"--logdir={logdir}", *flags)
    assert code != 0 and words in err
