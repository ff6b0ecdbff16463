# tests: wings/inference/published_settings.py, tools/generate.py
"""Tests that an imported model generates as it was published to."""

import importlib
import json

import pytest

import lingvo_gshard as gshard
from lingvo_gshard.tools import generate
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.flags.options import given_options
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from tests.open_models import published

SETTINGS = {
    "eos_token_id": 2,
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 3,
    "max_new_tokens": 4,
    "guidance_scale": 2.0,
}
OPTIONS = DecodingOptions(beam_size=1, temperature=0.7, top_k=3, most_tokens=4)

importing = importlib.import_module("lingvo_gshard.tools.import")


def write(directory, settings):
    published.write(directory)
    (directory / "generation_config.json").write_text(json.dumps(settings))


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Returns a run that was imported with SETTINGS by the command, which says so."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model", SETTINGS)
    command = ["gshard-import", "--from=model", "--logdir=run", "--length=16"]
    assert startup.guarded("gshard-import", importing.main)(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    said = "Texts are generated with temperature=0.7, top_k=3, most_tokens=4, beam_size=1, unless"
    assert said in out
    assert "generation_config.json: guidance_scale has no effect: it is unknown here" in out
    return gshard.load(tmp_path / "run")


def test_flags_override_the_settings_of_a_run(run):
    values = generate.define_flags()
    values(["gshard-generate", "--top_k=5", "--seed=2"])
    expected = DecodingOptions(beam_size=1, temperature=0.7, top_k=5, most_tokens=4, seed=2)
    given = given_options(values, DecodingOptions)
    assert run.published_settings.options(DRAWING, given) == expected
    values = generate.define_flags()
    values(["gshard-generate", "--temperature=0"])
    greedy = DecodingOptions(beam_size=1, temperature=0.0, most_tokens=4)
    given = given_options(values, DecodingOptions)
    assert run.published_settings.options(DRAWING, given) == greedy


@pytest.mark.slow
def test_texts_are_generated_with_the_settings(run, tmp_path, capsys):
    texts = run.generate(["w5 w7", "w4"], seed=3)
    assert texts == run.generate(["w5 w7", "w4"], OPTIONS, seed=3)
    assert run.generate(["w5"], temperature=0.0) == run.generate(
        ["w5"], DecodingOptions(beam_size=1, most_tokens=4)
    )
    (tmp_path / "lines").write_text("w5 w7\nw4\n")
    command = ["gshard-generate", "--logdir=run", "--input=lines", "--seed=3"]
    assert startup.guarded("gshard-generate", generate.main)(command) == 0
    assert capsys.readouterr().out.splitlines() == [text for (text,) in texts]


def test_wrong_settings_are_refused_before_anything_is_written(tmp_path):
    write(tmp_path / "model", SETTINGS | {"top_p": 2.0})
    with pytest.raises(ValueError, match=r"generation_config.json: `top_p=2.0`: a number"):
        gshard.import_model(tmp_path / "model", tmp_path / "run")
    assert not (tmp_path / "run").exists()
