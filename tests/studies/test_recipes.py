# tests: /studies/
"""Runs python -m studies recipes on a tiny model, and compares its table with sums by hand."""

import json
import math

import pytest

from lingvo_gshard.training.run.logdir import Logdir
from studies.recipes.results import RunResult, comparison
from tests.studies.running import run_study

SMALL = (
    "input.batch_rows = 4",
    "input.length = 24",
    "input.vocabulary.size = 300",
    "task.model_dim = 16",
    "task.decoder.hidden_dim = 16",
    "task.decoder.num_layers = 1",
    "task.decoder.moe_every = 0",
    "run.checkpoint_every_steps = 0",
)


def result(way, seed, perplexity, chrf=None, trained=8.0):
    return RunResult("task.tiny", way, seed, 7, perplexity, chrf, trained)


def test_differences_are_means_over_the_seeds_of_both_ways():
    table = comparison(
        [
            result("base", 1, 10.0, 40.0),
            result("base", 2, 20.0, 42.0),
            result("other", 1, 11.0, 41.0, 8.4),
            result("other", 2, 20.0, 44.0, 8.2),
            result("other", 3, 90.0, 10.0),
        ]
    )
    # +10% and 0%: 5 with a standard deviation of sqrt(50), of two runs.
    assert list(table.rows[1]) == [
        "other",
        "3",
        "7",
        f"{(11 + 20 + 90) / 3:.3f}",
        f"+5.00% ± {math.sqrt(50) / math.sqrt(2):.2f}",
        f"{(41 + 44 + 10) / 3:.2f}",
        "+1.50 ± 0.50",
        f"{(8.4 + 8.2 + 8.0) / 3:.3f}",
        "+3.75% ± 1.25",
    ]
    equal = "+0.00% ± 0.00"
    assert list(table.rows[0])[4:] == [equal, "41.00", "+0.00 ± 0.00", "8.000", equal]


def test_a_language_model_has_no_chrf():
    table = comparison([result("base", 1, 10.0), result("other", 2, 9.0)])
    first, last = ["way", "seeds", "steps"], ["in training", "against that of the first"]
    assert list(table.columns) == [*first, "perplexity", "against the first", *last]
    assert list(table.rows[1])[3:] == ["9.000", "-", "8.000", "-"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--folder is missing"),
        (["--folder=F"], "--compare or --way is missing"),
        (["--folder=F", "--way=fp8"], "names no way of --compare"),
        (["--folder=F", "--way=a b: x = 1"], "a name of letters, digits, _ and . was expected"),
        (["--folder=F", "--compare=precisions", "--seeds=1,b"], "'b' is no seed"),
        (["--folder=F", "--way=a: step.optimiser = 1"], "step.optimizer"),
        (["--folder=F", "--compare=optimizers", "--experiments=translation.quik"], "quickstart"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(capsys, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_study(capsys, "recipes", *flags)
    assert code == 1 and words in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_comparison_trains_what_is_missing(capsys, tmp_path):
    flags = [f"--folder={tmp_path}", "--experiments=language_model.quickstart", "--steps=4"]
    flags += ["--seeds=1,2", *(f"--gin_param={text}" for text in SMALL)]
    ways = ["--way=base:", "--way=slow: step.schedule.learning_rate = 1e-5"]
    code, out, _ = run_study(capsys, "recipes", *flags, *ways, "--notrain")
    assert code == 0 and "No run is trained" in out
    path = tmp_path / "found.json"
    code, out, err = run_study(capsys, "recipes", *flags, *ways, f"--json={path}")
    assert (code, err) == (0, ""), err
    found = json.loads(path.read_text())
    assert [(run["way"], run["seed"]) for run in found] == [
        ("base", 1),
        ("slow", 1),
        ("base", 2),
        ("slow", 2),
    ]
    assert found[0]["perplexity"] < found[1]["perplexity"]
    rows = (tmp_path / "language_model.quickstart-base-seed1/metrics.jsonl").read_text()
    last = json.loads(rows.splitlines()[-1])
    assert math.log(found[0]["training_perplexity"]) == pytest.approx(last["cross_entropy"])
    written = tmp_path / "language_model.quickstart-slow-seed2"
    before = (Logdir(written).path / "metrics.jsonl").stat().st_mtime_ns
    code, again, _ = run_study(capsys, "recipes", *flags, *ways)
    assert code == 0 and (Logdir(written).path / "metrics.jsonl").stat().st_mtime_ns == before
    assert (
        again[again.index("language_model.quickstart, scored") :]
        == (out[out.index("language_model.quickstart, scored") :])
    )
