# tests: wings/inference/decoding/precision.py, wings/inference/loading.py
# tests: wings/inference/layers/stored.py
"""Tests of decoding with int8 weights."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.lazy import jax
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.inference import stored_weights
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.decoding.precision import INT8, INT8_WEIGHTS
from lingvo_gshard.wings.inference.loading import make_engine
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS

LIMIT = 5
TRANSLATION, LANGUAGE_MODEL = tiny_engine.translation_model, tiny_engine.language_model


def requests(make, options):
    has_source = make is TRANSLATION
    return [
        Request(
            source=(3 + n % 5, 4 + n % 7, EOS) if has_source else (),
            given=(BOS,) if has_source else (BOS, 3 + n, 4),
            options=options,
        )
        for n in range(4)
    ]


def engine_of(model, precision, mesh=None, strategy="replicated"):
    facts = dataclasses.replace(model_facts(model.task, 64, BOS, (EOS,)), most_steps=5)
    partitioning = Partitioning.make(mesh, strategy) if mesh else None
    devices = jax.devices()[: partitioning.mesh.size] if partitioning else ()
    return make_engine(model.task, model.theta, facts, partitioning, devices, precision=precision)


def decode(engine, asked):
    return [answer.result() for answer in engine.submit_all(asked)]


def rounded(model):
    """Returns the model with the weights of its products rounded to int8 by NumPy."""

    def round_weight(path, weight):
        *_, layer, name = path.split(".")
        axes = {"table": (-1,), "w": (0,), "w_in": (-2,), "w_out": (-2,)}.get(name)
        if layer.endswith("attention"):
            axes = (0, 1) if name == "w_out" else (0,)
        if axes is None or layer == "router":
            return weight
        weight = np.asarray(weight)
        scale = np.abs(weight).max(axis=axes, keepdims=True) / 127
        return tf.constant((np.rint(weight / scale) * scale).astype(np.float32))

    return tiny_engine.Model(model.task, model.theta.transform_with_path(round_weight))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [TRANSLATION, pytest.param(LANGUAGE_MODEL, marks=pytest.mark.slow)]
)
def test_int8_weights_decode_as_the_model_with_rounded_weights(make):
    model = make()
    beam = 2 if make is TRANSLATION else 1
    options = DecodingOptions(beam_size=beam, most_tokens=LIMIT)
    asked = requests(make, options)
    with engine_of(model, INT8_WEIGHTS) as engine:
        found = decode(engine, asked)
        names = {str(weight.dtype) for weight in engine.weights}
    assert names == {"int8", "float32"}
    for request, (best, *_) in zip(asked, found, strict=True):
        given = request.source, request.given
        ended = tiny_engine.plain_beam(rounded(model), *given, LIMIT, options.beam_size)
        rank, tokens, gains = tiny_engine.ranked(ended, options.length_exponent)[0]
        assert best.tokens == tuple(token for token in tokens if token != EOS)
        if beam > 1:
            assert best.score == pytest.approx(rank, abs=1e-4)
        assert list(best.log_probabilities) == pytest.approx(list(gains), abs=1e-4)
        # Rounding shows, so that the equality says something.
        trained = model.log_probabilities(request.source, [request.given])[0, tokens[0]]
        assert abs(trained - gains[0]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [pytest.param(TRANSLATION, marks=pytest.mark.slow), LANGUAGE_MODEL]
)
def test_int8_products_find_nearly_what_the_trained_model_finds(make, monkeypatch):
    monkeypatch.setattr(stored_weights, "SMALL", 0)
    model = make()
    asked = requests(make, DecodingOptions(beam_size=1, most_tokens=LIMIT))
    with engine_of(model, INT8) as engine:
        found = [hypotheses[0] for hypotheses in decode(engine, asked)]
        (alone,) = decode(engine, asked[1:2])[0]
    equal = 0
    for request, best in zip(asked, found, strict=True):
        tokens, gains = tiny_engine.plain_greedy(model, request.source, request.given, LIMIT)
        equal += best.tokens == tuple(token for token in tokens if token != EOS)
        assert best.log_probabilities[0] == pytest.approx(gains[0], abs=0.2)
    assert equal >= 3
    # A row is rounded by itself: its result does not depend on others.
    assert alone.tokens == found[1].tokens
    assert alone.score == pytest.approx(found[1].score, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["expert_tensor", "fsdp"])
def test_a_mesh_finds_what_one_device_finds(strategy, monkeypatch):
    monkeypatch.setattr(stored_weights, "SMALL", 200)
    model = TRANSLATION()
    asked = requests(TRANSLATION, DecodingOptions(beam_size=2, most_tokens=LIMIT))
    with engine_of(model, INT8) as engine:
        expected = decode(engine, asked)
    with engine_of(model, INT8, "data=4,model=2", strategy) as engine:
        found = decode(engine, asked)
        split = [w for w in engine.weights if not w.sharding.is_fully_replicated]
    assert any(str(weight.dtype) == "int8" for weight in split)
    for (mine, *_), (theirs, *_) in zip(found, expected, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.score == pytest.approx(theirs.score, abs=0.05)


def test_an_unknown_precision_is_refused_with_the_nearest():
    model = tiny_engine.translation_model()
    with pytest.raises(ValueError, match=r"`precision=int-8` is unknown.*'int8'"):
        engine_of(model, "int-8")
