# tests: wings/export/decoder.py, wings/inference/decoding/steps.py
"""Tests a search as one function: it finds what the engine finds, text by text."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.wings.export.decoder import DecodeFunction, check_options, decoding_weights
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS

TEXTS = [[5, 7, 9, 4], [6], [], [8, 8, 10, 11, 12, 4, 5]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "beam"),
    [
        pytest.param("translation", 3, marks=pytest.mark.slow),
        ("language model", 1),
        pytest.param("translation", 1, marks=pytest.mark.slow),
        pytest.param("language model", 3, marks=pytest.mark.slow),
    ],
)
def test_finds_what_the_engine_finds(kind, beam):
    is_translation = kind == "translation"
    model = tiny_engine.translation_model() if is_translation else tiny_engine.language_model()
    options = DecodingOptions(beam_size=beam, most_tokens=0 if is_translation else 12)
    with model.engine() as engine:
        texts = [[*ids, EOS] if is_translation else [BOS, *ids] for ids in TEXTS if ids]
        answers = engine.submit_all(
            [
                Request(source=ids, given=[BOS], options=options)
                if is_translation
                else Request(given=ids, options=options)
                for ids in texts
            ]
        )
        expected = [answer.result()[0] for answer in answers]
    ids_BK = np.zeros([4, 9], np.int32)
    for row, ids in zip(ids_BK, texts, strict=False):
        row[: len(ids)] = ids
    function = DecodeFunction(model.task, engine.facts, options)
    weights = decoding_weights(model.task, model.theta.transform(np.asarray))

    @tf.function(jit_compile=True, autograph=False)
    def run(ids_BK):
        return function.run(weights.transform(tf.constant), ids_BK)

    token_BL, score_B = (x.numpy() for x in run(tf.constant(ids_BK)))
    found = [[token for token in row if token] for row in token_BL.tolist()]
    # These models also choose 0, which no text shows.
    tokens = [[token for token in answer.tokens if token] for answer in expected]
    assert found == [*tokens, []]
    scores = [answer.score for answer in expected]
    np.testing.assert_allclose(score_B, [*scores, 0.0], rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 1, "temperature": 1.0},
        {"beam_size": 2, "best": 2},
        {"beam_size": 1, "stop": (".",)},
        {"forbidden_tokens": (4,)},
    ],
)
def test_options_that_need_a_host_are_refused(options):
    with pytest.raises(ValueError, match="an exported program finds the best text by beam search"):
        check_options(dataclasses.replace(DecodingOptions(), **options))
