# tests: wings/export/stablehlo_writer.py, api/export.py, wings/export/decoder.py
"""Tests exported programs: run by jax alone, they answer as the run does."""

import json

import jax
import jax.export
import numpy as np
import pytest
from safetensors.flax import load_file

import lingvo_gshard as gshard
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from tests.export import elsewhere, models
from tests.open_models import published

pytestmark = pytest.mark.xdist_group("trained_logdir")

_RUNNER = """
def answer(directory, texts):
    return Model(directory).answer(texts)
"""


def run_elsewhere(*pairs):
    """Returns the answers of the program on docs/decoding.md to (directory, texts), ..."""
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
def test_an_imported_model_ends_with_any_of_its_ids(tmp_path):
    published.write(tmp_path / "model")
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=16)
    run = gshard.load(tmp_path / "run")
    options = DecodingOptions(beam_size=4, length_exponent=0.0, most_tokens=12)
    run.export(tmp_path / "out", "stablehlo", gshard.DecoderSettings(options, (8,)))
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert (facts["bos"], facts["eos"], facts["ends"], facts["pad"]) == (1, 2, [2, 3], -1)
    # Id 0 is a token as any other.
    prompts = [[1, 4, 5], [1, 7, 17], [1, 0, 7, 0], [1]]
    ids = np.full((8, facts["longest"]), facts["pad"], np.int32)
    for row, prompt in zip(ids, prompts, strict=False):
        row[: len(prompt)] = prompt
    content = (tmp_path / "out" / facts["programs"][-1]["file"]).read_bytes()
    weights = load_file(tmp_path / "out" / "weights.safetensors")
    values = [weights[name] for name in facts["weights"]]
    found, _ = jax.export.deserialize(bytearray(content)).call(*values, ids)
    requests = [Request(given=prompt, options=options) for prompt in prompts]
    expected = [a.result()[0] for a in run.decoder.engine.submit_all(requests)]
    assert {answer.end for answer in expected} & {2, 3}
    rows = [[i for i in row if i != facts["pad"]] for row in np.asarray(found).tolist()]
    assert rows == [*(list(answer.tokens) for answer in expected), [], [], [], []]


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
