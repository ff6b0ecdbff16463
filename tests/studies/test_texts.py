# tests: /studies/
"""Runs python -m studies texts on a small corpus, and extracts the text of documentation."""

import gzip
import json
import math
import pathlib
import subprocess
import sys

import pytest

from lingvo_gshard.wings.preparation.prepared import manifest
from studies.texts import extract
from tests.preparation.prepared import corpora
from tests.studies.running import run_study

SIZES = {("und", "manual"): (300, 0, 9), ("und", "essays"): (90, 0, 5)}
SMALL = (
    "input.batch_rows = 4",
    "input.length = 32",
    "task.model_dim = 16",
    "task.decoder.hidden_dim = 16",
    "task.decoder.num_layers = 1",
    "run.checkpoint_every_steps = 0",
)


def test_mistakes_are_told_before_anything_is_trained(capsys, tmp_path):
    folder = f"--folder={tmp_path / 'study'}"
    code, _, err = run_study(capsys, "texts")
    assert code == 1 and "--folder is missing" in err
    code, _, err = run_study(capsys, "texts", folder, "--models=study.text_dens")
    assert code == 1 and "study.text_dense" in err
    code, _, err = run_study(capsys, "texts", folder, "--more_seeds=b")
    assert code == 1 and "--more_seeds: 'b' is no seed" in err
    code, _, err = run_study(capsys, "texts", folder, "--gin_param=input.directory = 'nowhere'")
    assert code == 1 and "nowhere" in err
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_a_study_trains_what_is_missing_and_compares_kinds_of_text(capsys, tmp_path):
    corpora.prepare(tmp_path / "prepared", SIZES, content=manifest.TEXT)
    flags = [f"--folder={tmp_path / 'study'}", "--models=study.text_dense,study.text_experts_8"]
    flags += ["--steps=6", *(f"--gin_param={text}" for text in SMALL)]
    flags.append(f"--gin_param=input.directory = '{tmp_path / 'prepared'}'")
    code, out, _ = run_study(capsys, "texts", *flags, "--notrain")
    assert code == 0 and "No model is trained" in out
    path = tmp_path / "study.json"
    code, out, err = run_study(capsys, "texts", *flags, "--more_seeds=2", f"--json={path}")
    assert (code, err) == (0, ""), err
    found = json.loads(path.read_text())
    models = ["text_dense", "text_experts_8", "text_dense", "text_experts_8"]
    assert [run["model"] for run in found] == models
    assert [run["seed"] for run in found] == [1, 1, 2, 2]
    for run in found:
        tokens, cost = run["tokens"], {k: math.log(v) for k, v in run["perplexity"].items()}
        assert tokens["all"] == tokens["manual"] + tokens["essays"]
        nats = sum(tokens[kind] * cost[kind] for kind in ("manual", "essays"))
        assert nats / tokens["all"] == pytest.approx(cost["all"])
    for words in ("text_experts_8", "manual", "essays", "bits per byte", "±"):
        assert words in out
    code, again, _ = run_study(capsys, "texts", *flags, "--more_seeds=2")
    assert code == 0 and again[again.index("Models") :] == out[out.index("Models") :]


PAGE = """<!DOCTYPE html><html><head><title>T</title><style>p {x}</style></head><body>
<nav>Up <a href="x">Next</a></nav><h1>About &amp; more</h1><p>One <b>bold</b>
word.<br>Two</p><script>var a = "<p>no</p>";</script><ul><li>first<li>second</ul></body></html>"""


def test_the_text_of_a_page_has_a_line_for_each_block():
    expected = "About & more\nOne bold\nword.\nTwo\nfirst\nsecond"
    assert extract.text_of("a.html", PAGE) == expected
    assert extract.text_of("a.rst", "A  b\n\n* c\n") == "A b\n* c"


def test_files_in_english_that_are_no_lists_are_extracted(tmp_path):
    words = " ".join(f"word{number}" for number in range(50))
    files = {
        "usr/share/doc/a/index.html": f"<p>{words} one</p>",
        "usr/share/doc/a/de-DE/index.html": f"<p>{words} German</p>",
        "usr/share/help/C/b/c.page": f"<page><p>{words} two</p></page>",
        "usr/share/help/fr/b/c.page": f"<page><p>{words} French</p></page>",
        "usr/share/doc/a/genindex.html": f"<p>{words} index</p>",
        "usr/share/doc/a/short.txt": "too short",
        "usr/share/doc/a/ptr/mem.html": f"<p>{words} three</p>",
    }
    for name, content in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    path = tmp_path / "root" / "usr/share/doc/a/notes.txt.gz"
    path.write_bytes(gzip.compress(f"{words} four".encode()))
    output = tmp_path / "kind.jsonl"
    script = pathlib.Path(extract.__file__)
    subprocess.run([sys.executable, script, output, tmp_path / "root"], check=True)
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert sorted(text.split()[-1] for text in texts) == ["four", "one", "three", "two"]
