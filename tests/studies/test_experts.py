# tests: /studies/
"""Runs python -m studies experts on a small corpus, and compares its groups with sums over rows."""

import json
import math

import pytest

from lingvo_gshard.tools.experts.report import OTHER, family
from lingvo_gshard.training.run.logdir import Logdir
from studies.experts import results
from tests.preparation.prepared import corpora
from tests.studies.running import run_study

SIZES = {("de", "news"): (300, 8, 8), ("sw", "web"): (60, 8, 8), ("ja", "web"): (90, 8, 8)}
SMALL = (
    "input.batch_rows = 4",
    "input.source_length = 32",
    "input.target_length = 20",
    "task.model_dim = 16",
    "task.encoder.hidden_dim = 16",
    "task.decoder.hidden_dim = 16",
    "run.checkpoint_every_steps = 0",
)


def scores(rows, tokens, cross_entropy, chrf):
    translated = {"chrf": chrf, "bleu": chrf / 2}
    found = {"rows": rows, "tokens": tokens, "translated": translated}
    return found | {"cross_entropy": cross_entropy, "accuracy": 0.5, "rows_too_long": 0}


def test_tokens_of_a_group_count_the_same_in_perplexity_and_rows_in_chrf():
    found = {"de": scores(4, 30, 2.0, 40.0), "sw": scores(1, 10, 4.0, 10.0)}
    found["ja"] = scores(2, 0, None, 20.0)
    grouped = results.grouped(found, dict.fromkeys(found, "all") | {"ja": "least"})
    assert grouped["all"].rows == 5 and grouped["least"].rows == 2
    assert grouped["all"].perplexity == pytest.approx(math.exp((30 * 2.0 + 10 * 4.0) / 40))
    assert grouped["all"].chrf == pytest.approx((4 * 40 + 10) / 5)
    assert grouped["all"].bleu == pytest.approx((4 * 20 + 5) / 5)
    assert math.isnan(grouped["least"].perplexity)


def test_thirds_have_the_same_number_of_languages():
    rows = {"de": 90, "fr": 80, "sw": 7, "ja": 70, "fo": 6, "ba": 50, "eo": 50}
    assert results.thirds_of(rows) == {
        **dict.fromkeys(("de", "fr", "ja"), "most text"),
        **dict.fromkeys(("ba", "eo", "sw"), "middle"),
        "fo": "least text",
    }


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("pt_BR", "Romance"),
        ("ca@valencia", "Romance"),
        ("be_tarask", "Slavic"),
        ("zh_Hant", "Sino-Tibetan"),
        ("sw", "Niger-Congo"),
        ("eu", OTHER),
    ],
)
def test_a_code_with_a_script_or_a_region_has_the_family_of_its_language(language, expected):
    assert family(language) == expected


def test_mistakes_are_told_before_anything_is_trained(capsys, tmp_path):
    folder = f"--folder={tmp_path / 'study'}"
    code, _, err = run_study(capsys, "experts")
    assert code == 1 and "--folder is missing" in err
    code, _, err = run_study(capsys, "experts", folder, "--models=study.dens")
    assert code == 1 and "study.dense" in err
    code, _, err = run_study(capsys, "experts", folder, "--seeds=1,b")
    assert code == 1 and "'b' is no seed" in err
    code, _, err = run_study(capsys, "experts", folder, "--gin_param=input.directry = 'x'")
    assert code == 1 and "input.directory" in err
    code, _, err = run_study(capsys, "experts", folder, "--gin_param=input.directory = 'nowhere'")
    assert code == 1 and "nowhere" in err
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_a_study_trains_what_is_missing_and_compares(capsys, tmp_path):
    corpora.prepare(tmp_path / "prepared", SIZES)
    flags = [f"--folder={tmp_path / 'study'}", "--models=study.dense,study.experts_8", "--steps=6"]
    flags += [f"--gin_param={text}" for text in SMALL]
    flags.append(f"--gin_param=input.directory = '{tmp_path / 'prepared'}'")
    code, out, _ = run_study(capsys, "experts", *flags, "--notrain")
    assert code == 0 and "No model of all languages" in out
    path = tmp_path / "study.json"
    code, out, err = run_study(capsys, "experts", *flags, "--bilingual=sw", f"--json={path}")
    assert (code, err) == (0, ""), err
    found = json.loads(path.read_text())
    assert [(run["model"], run["language"]) for run in found] == [
        ("dense", ""),
        ("experts_8", ""),
        ("bilingual", "sw"),
    ]
    dense, _, bilingual = found
    assert set(dense["languages"]) == {"de", "ja", "sw"} and set(bilingual["languages"]) == {"sw"}
    assert dense["thirds"]["most text"] == dense["languages"]["de"]
    for words in ("experts_8", "least text", "Niger-Congo", "best step"):
        assert words in out
    written = Logdir(tmp_path / "study" / "dense-seed1").path / "metrics.jsonl"
    before = written.stat().st_mtime_ns
    code, again, _ = run_study(capsys, "experts", *flags, "--bilingual=sw")
    assert code == 0 and written.stat().st_mtime_ns == before
    assert again[again.index("Perplexity") :] == out[out.index("Perplexity") :]
    limited = [*flags, "--max_rows_per_language=2", f"--json={path}"]
    assert run_study(capsys, "experts", *limited)[0] == 0
    assert written.stat().st_mtime_ns == before
    rows = {
        name: scores["rows"]
        for name, scores in json.loads(path.read_text())[0]["languages"].items()
    }
    assert rows == dict.fromkeys(("de", "ja", "sw"), 2) and dense["languages"]["de"]["rows"] > 2
