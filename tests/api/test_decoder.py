"""Tests that a second start decodes without TensorFlow, and equally."""

import gc
import json
import subprocess
import sys
import weakref

import pytest

import lingvo_gshard as gshard
from lingvo_gshard.api.decoding import decoder
from lingvo_gshard.runtime.lowering import lowering

_SECOND_START = """
import json, sys
import lingvo_gshard as gshard
options = gshard.RuntimeOptions(compilation_cache=sys.argv[2])
with gshard.load(sys.argv[1], options=options) as run:
    (found,) = run.translator(gshard.DecodingOptions(beam_size=2)).translate(["der Hund"]).best
imported = [name for name in ("tensorflow", "orbax") if name in sys.modules]
print(json.dumps([found[0].text, found[0].score, run.step, imported]))
"""


def translated(logdir, cache):
    """Returns the translation of a sentence and its score by a run that is opened anew."""
    run = gshard.load(logdir, options=gshard.RuntimeOptions(compilation_cache=str(cache)))
    (found,) = run.translator(gshard.DecodingOptions(beam_size=2)).translate(["der Hund"]).best
    return found[0].text, found[0].score


@pytest.mark.parametrize("mesh", ["", pytest.param("data=2", marks=pytest.mark.slow)])
def test_decoding_keeps_no_trained_weights(trained_logdir, monkeypatch, mesh):
    trained = []
    prepare = decoder.prepared_weights

    def prepared(executables, theta, is_last):
        trained.extend(map(weakref.ref, theta.flatten()))
        return prepare(executables, theta, is_last)

    monkeypatch.setattr(decoder, "prepared_weights", prepared)
    options = gshard.RuntimeOptions(compilation_cache="", mesh=mesh or None)
    run = gshard.load(trained_logdir, options=options)
    run.translator(gshard.DecodingOptions(beam_size=2)).translate(["der Hund"])
    gc.collect()
    assert trained and not any(weight() is not None for weight in trained)
    # What else needs them restores them.
    held = run.model.runtime.theta_on_host().flatten()
    assert [x.shape for x in held] == [tuple(x.shape) for x in run.model.theta.flatten()]


@pytest.mark.slow
def test_a_second_start_needs_no_tensorflow_and_damage_is_repaired(
    trained_logdir, tmp_path, monkeypatch
):
    text, score = translated(trained_logdir, tmp_path)
    arguments = [sys.executable, "-c", _SECOND_START, trained_logdir, str(tmp_path)]
    result = subprocess.run(arguments, check=True, timeout=300, capture_output=True, text=True)
    assert json.loads(result.stdout) == [text, pytest.approx(score, abs=1e-5), 20, []]

    lowered = []
    lower = lowering.lower
    monkeypatch.setattr(
        "lingvo_gshard.wings.inference.programs.maker.lower",
        lambda name, *args: lowered.append(name.partition("_")[0]) or lower(name, *args),
    )
    again = translated(trained_logdir, tmp_path)
    assert again == (text, pytest.approx(score, abs=1e-5)) and not lowered
    for damaged, expected in (("steps-*.program", {"prepare", "steps"}), ("*.json", {"prepare"})):
        (path,) = tmp_path.rglob(damaged)
        path.write_bytes(path.read_bytes()[:100])
        again = translated(trained_logdir, tmp_path)
        assert again == (text, pytest.approx(score, abs=1e-5))
        assert set(lowered) == expected
        assert translated(trained_logdir, tmp_path) == again and set(lowered) == expected
        lowered.clear()
