# tests: wings/export/saved_model_writer.py, wings/export/decoder.py, api/export.py
"""Tests SavedModels: run by TensorFlow and tensorflow-text alone, they answer as the run does."""

import importlib.util
import json

import pytest

import lingvo_gshard as gshard
from tests.export import elsewhere, models

pytestmark = pytest.mark.xdist_group("trained_logdir")

_RUNNER = """
import tensorflow as tf
import tensorflow_text
def answer(directory, texts):
    serve = tf.saved_model.load(directory).signatures["serving_default"]
    found = serve(texts=tf.constant(texts))
    assert found["scores"].shape == [len(texts)]
    return [text.decode() for text in found["outputs"].numpy()]
"""


def run_elsewhere(*pairs):
    """Returns the answers of SavedModels to (directory, texts), ..."""
    return json.loads(elsewhere.run(_RUNNER + models.ANSWER_ALL, models.requests(*pairs)))


@pytest.mark.slow
def test_greedy_decoding_runs_elsewhere(trained_logdir, tmp_path):
    models.export(trained_logdir, tmp_path / "out", "saved_model", 1, (2,), (32,))
    (found,) = run_elsewhere((tmp_path / "out", models.SENTENCES))
    assert found == models.translations(trained_logdir, models.SENTENCES, 1)
    assert any(found)


@pytest.mark.slow
def test_all_kinds_run_elsewhere(trained_logdir, language_model_logdir, tmp_path):
    long = [*models.SENTENCES, "Haus Garten Brot " * 200]
    models.export(trained_logdir, tmp_path / "beam", "saved_model", 3, (1, 4), (32, 256))
    for beam in (1, 3):
        directory = tmp_path / f"language_model{beam}"
        models.export(language_model_logdir, directory, "saved_model", beam, (1, 4), ())
    beginnings = [*models.BEGINNINGS, "the dog sees " * 20]
    found = run_elsewhere(
        (tmp_path / "beam", long),
        (tmp_path / "beam", long[:1]),
        *((tmp_path / f"language_model{beam}", beginnings) for beam in (1, 3)),
    )
    with pytest.warns(UserWarning, match="was cut"):
        expected = models.translations(trained_logdir, long, 3)
    assert found[:2] == [expected, expected[:1]]
    expected = [models.continuations(language_model_logdir, beginnings, b) for b in (1, 3)]
    assert found[2:] == expected


@pytest.mark.slow
def test_the_program_on_the_page_runs(trained_logdir, tmp_path):
    models.export(trained_logdir, tmp_path / "out", "saved_model", 1, (2,), (32,))
    program = elsewhere.program_of_page("run_saved_model.py")
    printed = elsewhere.run(program, tmp_path / "out", stdin="\n".join(models.SENTENCES) + "\n")
    expected = models.translations(trained_logdir, models.SENTENCES, 1)
    assert printed.splitlines() == expected


def test_missing_tensorflow_text_is_named(trained_logdir, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: find(name) if name != "tensorflow_text" else None
    )
    with pytest.raises(ValueError, match="needs the package tensorflow-text.*pip install '") as e:
        gshard.load(trained_logdir).export(tmp_path / "out", "saved_model")
    assert "tensorflow-text~=2." in str(e.value)
    assert not list(tmp_path.iterdir())
