"""Tests exported programs: run by jax alone, they answer as the run does."""

import json

import pytest

from tests.export import elsewhere, models

pytestmark = pytest.mark.xdist_group("trained_logdir")

_RUNNER = """
def answer(directory, texts):
    return Model(directory).answer(texts)
"""


def run_elsewhere(*pairs):
    """Returns the answers of the program on docs/export.md to (directory, texts), ..."""
    program = elsewhere.program_of_page("run_programs.py").replace('"__main__"', "None")
    code = program + _RUNNER + models.ANSWER_ALL + "assert 'tensorflow' not in sys.modules\n"
    return json.loads(elsewhere.run(code, models.requests(*pairs)))


def test_the_program_on_the_page_has_60_lines_of_code_at_most():
    lines = elsewhere.program_of_page("run_programs.py").splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 60


@pytest.mark.slow
def test_beam_search_runs_elsewhere(trained_logdir, tmp_path):
    export = models.export(trained_logdir, tmp_path / "out", "stablehlo", 2, (2,), (32,))
    assert {"model.json", "weights.safetensors", "decode-2x32.stablehlo"} <= export.files.keys()
    (found,) = run_elsewhere((tmp_path / "out", models.SENTENCES))
    assert found == models.translations(trained_logdir, models.SENTENCES, 2)
    assert any(found)


@pytest.mark.slow
def test_all_kinds_run_elsewhere(trained_logdir, language_model_logdir, tmp_path):
    long = [*models.SENTENCES, "Haus Garten Brot " * 200]
    for beam in (1, 3):
        directory = tmp_path / f"translation{beam}"
        models.export(trained_logdir, directory, "stablehlo", beam, (1, 4), (32, 256))
        directory = tmp_path / f"language_model{beam}"
        models.export(language_model_logdir, directory, "stablehlo", beam, (1, 4), ())
    beginnings = [*models.BEGINNINGS, "the dog sees " * 20]
    found = run_elsewhere(
        *((tmp_path / f"translation{beam}", long) for beam in (1, 3)),
        *((tmp_path / f"language_model{beam}", beginnings) for beam in (1, 3)),
    )
    with pytest.warns(UserWarning, match="was cut"):
        expected = [models.translations(trained_logdir, long, beam) for beam in (1, 3)]
    expected += [models.continuations(language_model_logdir, beginnings, b) for b in (1, 3)]
    assert found == expected
