# tests: /benchmarks/
"""Runs the programs of benchmarks/ at tiny sizes: measurements, output, help and errors."""

import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import choices
from lingvo_gshard.core.config import registry
from tests.benchmarks.running import run
from tests.tools.test_bench import EXPERIMENT, tiny_translation

TINY = (f"--experiment={EXPERIMENT}", "--repeats=2")
STACK = (
    "--model_dim=8",
    "--hidden_dim=12",
    "--num_experts=4",
    "--num_heads=2",
    "--tokens=16",
    "--row_length=8",
)


@pytest.fixture(autouse=True)
def experiment(monkeypatch):
    monkeypatch.setitem(registry._EXPERIMENTS._features, EXPERIMENT, tiny_translation)


@pytest.mark.slow
def test_depth_measures_layers_as_a_loop(capsys, tmp_path):
    path = tmp_path / "depth.json"
    code, out, _ = run(capsys, "depth", f"--json={path}", "--depths=4,2", *TINY, *STACK)
    assert code == 0 and "one by one" in out
    rows = json.loads(path.read_text())["rows"]
    assert [(row["layers"], row["repeat"]) for row in rows] == [(2, False), (2, True), (4, True)]
    assert rows[0]["ratio"] == 1.0 and rows[1]["ratio"] > 0 and rows[2]["ratio"] is None
    assert all(row["compile_seconds"] > row["seconds"] > 0 for row in rows)


@pytest.mark.slow
def test_choices_measures_each_technique(capsys, tmp_path, monkeypatch):
    picked = ("layers one by one", "a loop, rematerialize full", "averaged weights")
    every = choices.choices()
    monkeypatch.setattr(choices, "choices", lambda: {name: every[name] for name in picked})
    path = tmp_path / "choices.json"
    code, out, _ = run(capsys, "choices", f"--json={path}", *TINY, "--num_layers=2")
    assert code == 0 and "temporaries" in out
    rows = json.loads(path.read_text())["rows"]
    assert tuple(row["name"] for row in rows) == picked
    plain, loop, averaged = rows
    assert plain["ratio"] == 1.0 and loop["ratio"] > 0
    assert averaged["state_bytes"] > plain["state_bytes"] == loop["state_bytes"]
    for row in (loop, averaged):
        # 31 steps amplify the rounding of the first one.
        assert row["loss"] == pytest.approx(plain["loss"], rel=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the subcommand is missing. Valid: agents, choices, decode, depth, input"),
        (["dept"], "'dept' is unknown. Did you mean 'depth'?"),
        (["decode", "--depths=2"], "--depths=2 applies to `depth`, not to `decode`"),
        (["depth", "--depths=0,6"], "--depths=0,6: expected positive integers"),
        (["serve"], "--logdir is missing: the directory that gshard-train wrote"),
        (["parity", "--families=lama"], "--families=lama is unknown. Did you mean 'llama'?"),
        (["parity", "--peers_python=/none"], "has not all of torch and transformers"),
        (["train", "--libraries=marain"], "--libraries=marain is unknown. Did you mean 'marian'?"),
        (["train", "--settings=shrt"], "--settings=shrt is unknown. Did you mean 'short'?"),
        (["train", "--seeds=0"], "--seeds=0: expected positive integers"),
        (["train", "--peers_python=/none"], "sentencepiece, joeynmt and importlib_metadata"),
        (["train", "--libraries=joeynmt"], "joeynmt, not all of which are installed"),
        (["decode", "--peers_python=/none"], "--peers_python=/none: this Python has not all of"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == ""
    assert err.startswith("benchmarks: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("subcommand", benchmarks.SUBCOMMANDS)
def test_each_program_explains_itself(capsys, subcommand):
    code, out, _ = run(capsys, subcommand, "--help")
    assert code == 0
    assert f"python -m benchmarks {subcommand}" in out and "--json" in out
