# tests: wings/inference/decoding/beam.py, wings/inference/decoding/greedy.py
# tests: wings/inference/decoding/steps.py, wings/export/decoder.py
"""Compares decoding with transformers, as `searches` and `decodes` have recorded it."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard as gshard
from lingvo_gshard.wings.export.decoder import DecodeFunction, TrainedModel, decoding_weights
from lingvo_gshard.wings.inference.engine.shapes import EngineOptions
from lingvo_gshard.wings.inference.loading import facts_of, make_engine
from lingvo_gshard.wings.inference.model_facts import ModelFacts
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Hypothesis, Request
from tests.open_models.recorded import decodes, searches

DECODED = json.loads(decodes.FILE.read_text(encoding="utf-8"))["cases"]
RECORDED = json.loads(searches.FILE.read_text(encoding="utf-8"))["models"]
LENGTH = 32


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(model, id=f"seed{model['seed']}", marks=pytest.mark.slow if place else ())
        for place, model in enumerate(RECORDED)
    ],
)
def recorded(request, tmp_path_factory):
    """Returns the cases of a model, and the model of a run that it was imported to."""
    folder = tmp_path_factory.mktemp("peer")
    searches.write_model(folder / "model", request.param["seed"])
    gshard.import_model(folder / "model", folder / "run", length=LENGTH)
    return request.param["cases"], gshard.load(folder / "run").model


def options_of(case: dict, best: int) -> DecodingOptions:
    # Ours count the end, too.
    least = case["least"] + 1 if case["least"] else 0
    return DecodingOptions(
        beam_size=case["beam"],
        best=best,
        length_exponent=0.0,
        most_tokens=case["most"],
        least_tokens=least,
        forbidden_tokens=tuple(case["forbidden"]),
    )


def facts_for(model: TrainedModel, ends: list[int]) -> ModelFacts:
    facts = facts_of(model.task, model.input.p, LENGTH)
    return dataclasses.replace(facts, end_ids=tuple(ends), pad_id=-1)


def tokens_with_end(found: Hypothesis) -> list[int]:
    return [*found.tokens] if found.end is None else [*found.tokens, found.end]


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(ends, marks=() if ends == [2, 3] else pytest.mark.slow)
        for ends in searches.ENDS
    ],
    ids=str,
)
def test_searches_are_those_of_transformers(recorded, ends):
    cases, model = recorded
    cases = [case for case in cases if case["ends"] == ends]
    options = EngineOptions(workers=1)
    with make_engine(model.task, model.theta, facts_for(model, ends), options=options) as engine:
        answers = engine.submit_all(
            [Request(given=c["prompt"], options=options_of(c, c["beam"])) for c in cases]
        )
        found = [answer.result() for answer in answers]
    for case, hypotheses in zip(cases, found, strict=True):
        assert [tokens_with_end(one) for one in hypotheses] == [
            one["tokens"] for one in case["found"]
        ]
        scores = [one["score"] for one in case["found"]]
        np.testing.assert_allclose([one.score for one in hypotheses], scores, atol=1e-3)
        sums = [sum(one.log_probabilities) for one in hypotheses]
        np.testing.assert_allclose(sums, scores, atol=1e-3)


@pytest.mark.parametrize("beam", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_an_exported_search_is_that_of_transformers(recorded, beam):
    """All cases without forbidden tokens, by limits and ends that one program has."""
    cases, model = recorded
    case = next(
        c
        for c in cases
        if c["beam"] == beam and len(c["ends"]) > 1 and not c["forbidden"] and c["most"] > 2
    )
    facts, options = facts_for(model, case["ends"]), options_of(case, 1)
    function = DecodeFunction(model.task, facts, options)
    weights = decoding_weights(model.task, model.theta.transform(np.asarray))

    @tf.function(jit_compile=True, autograph=False)
    def run(ids_BK):
        return function.run(weights.transform(tf.constant), ids_BK)

    prompts = [case["prompt"], case["prompt"][:1]]
    ids = np.full([3, 10], facts.pad_id, np.int32)
    for row, prompt in zip(ids, prompts, strict=False):
        row[: len(prompt)] = prompt
    token_BL, score_B = (x.numpy() for x in run(tf.constant(ids)))
    expected = case["found"][0]
    tokens = [token for token in expected["tokens"] if token not in case["ends"]]
    assert [token for token in token_BL[0] if token != facts.pad_id] == tokens
    assert score_B[0] == pytest.approx(expected["score"], abs=1e-3)
    assert set(token_BL[2]) == {facts.pad_id} and score_B[2] == 0


@pytest.mark.parametrize(
    "decoded",
    [
        pytest.param(each, id=name, marks=() if name in decodes.QUICK else pytest.mark.slow)
        for each, name in ((each, each["case"]) for each in DECODED)
    ],
)
def test_prompts_of_several_lengths_go_on_as_in_transformers(decoded, tmp_path):
    """All in one batch, past windows and past the tokens that an indexer chooses."""
    decodes.write_model(tmp_path / "model", decoded["case"])
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=LENGTH)
    model, expected = gshard.load(tmp_path / "run").model, decoded["tokens"]
    # No token ends a text: the end is an id that is not expected.
    unused = min(set(range(99)) - {token for tokens in expected for token in tokens})
    options = DecodingOptions(beam_size=1, most_tokens=len(expected[0]))
    requests = [Request(given=prompt, options=options) for prompt in decoded["prompts"]]
    with make_engine(model.task, model.theta, facts_for(model, [unused])) as engine:
        found = [answer.result()[0].tokens for answer in engine.submit_all(requests)]
    assert [list(tokens) for tokens in found] == expected
