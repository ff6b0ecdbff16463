# tests: wings/serving/endpoints/translate.py, wings/inference/routed_experts.py
# tests: wings/inference/translator.py
"""Tests /v1/translate: its answers are those of the translator, and its errors are sentences."""

import dataclasses

import numpy as np
import pytest
from starlette.testclient import TestClient

from lingvo_gshard.core import context
from lingvo_gshard.layers import token_context
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.service import Service
from tests.data import corpora
from tests.layers.moe import algorithm

pytestmark = pytest.mark.xdist_group("serving")

SOURCES = [row.source for row in corpora.rows(3)]
GREEDY = {"beam_size": 1, "most_tokens": 8}


def translate(client, **body):
    return client.post("/v1/translate", json=body)


def error_of(response):
    return response.status_code, response.json()["error"]["message"]


def test_alternatives_scores_and_tokens_are_those_of_the_translator(client, translating):
    options = DecodingOptions(beam_size=2, best=2, most_tokens=8)
    expected = translating.translator.translate(SOURCES, options=options)
    answer = translate(client, text=SOURCES, beam_size=2, best=2, most_tokens=8).json()
    assert [one["text"] for one in answer["translations"]] == expected.texts
    for one, found in zip(answer["translations"], expected.best, strict=True):
        assert [a["text"] for a in one["alternatives"]] == [t.text for t in found]
        for alternative, translation in zip(one["alternatives"], found, strict=True):
            tokens = alternative["tokens"]
            assert [t["text"] for t in tokens][: len(translation.pieces)] == [*translation.pieces]
            np.testing.assert_allclose(
                [t["log_probability"] for t in tokens], translation.log_probabilities, rtol=1e-5
            )
            assert alternative["score"] == pytest.approx(translation.score, rel=1e-5)
            assert alternative["reason"] == translation.reason


def test_one_sentence_and_an_empty_one(client):
    (one,) = translate(client, text=SOURCES[0], **GREEDY).json()["translations"]
    assert one["source"] == SOURCES[0] and len(one["alternatives"]) == 1
    first, second = translate(client, text=["", SOURCES[0]], **GREEDY).json()["translations"]
    assert first == {"source": "", "text": "", "alternatives": []}
    assert second["text"] == one["text"]


def top_2_gates(logits):
    """Returns the gates of Algorithm 1 (arXiv 2006.16668) of one token, 0 for all but two."""
    share = algorithm.softmax(logits)
    gates = np.zeros(len(share))
    first, second = np.argsort(-share, kind="stable")[:2]
    for expert in (first, second):
        gates[expert] = share[expert] / (share[first] + share[second])
    return gates


def test_routing_is_that_of_a_forward_pass_of_training(client, translating, translation_run):
    body = translate(client, text=SOURCES[0], routing=True, least_tokens=3, **GREEDY).json()
    routing = body["translations"][0]["alternatives"][0]["routing"]
    task, theta = translation_run.model.task, translation_run.model.theta
    (source,) = translating.translator.encode(SOURCES[:1])
    vocabulary = translating.vocabulary
    ids = {vocabulary.piece(i): i for i in range(vocabulary.size)}
    source = np.array([[*source, vocabulary.eos_id]], np.int32)
    target = np.array([[vocabulary.bos_id, *(ids[t["text"]] for t in routing["tokens"])]], np.int32)
    gates = {}

    def on_result(path, method, result):
        if method == "logits" and path.endswith(".router"):
            logits = result.numpy().reshape(-1, result.shape[-1])
            gates[path.removesuffix(".router")] = np.array([top_2_gates(each) for each in logits])

    batch = {"source_ids": source, "target_inputs": target}
    for side, array in (("source", source), ("target", target)):
        batch[f"{side}_segments"] = np.ones_like(array)
        batch[f"{side}_positions"] = np.arange(array.shape[1], dtype=np.int32)[None]
    with context.scope(training=False), context.override(on_result=on_result):
        with token_context.override(keeps_all=True):
            task.logits(theta, batch)
    for layer in routing["layers"]:
        tokens = routing["source"] if layer["stack"] == "encoder" else routing["tokens"]
        expected = gates[layer["path"]][-len(tokens) :]
        assert (np.sum(expected > 0, -1) == 2).all()
        assert expected.shape == (len(tokens), layer["num_experts"])
        found = np.zeros_like(expected)
        for position, token in enumerate(tokens):
            (experts,) = token["experts"]
            for expert, gate in experts:
                found[position, expert] = gate
        assert found.any()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"text": "a"', 400, "the body is not valid JSON: Input data was truncated"),
        (b"[" * 10_000, 400, "the body is nested too deeply"),
        (b'{"text": "\xff"}', 400, "the body is not valid JSON: "),
        (b"[]", 422, "the body is []; an object was expected"),
        (b"{}", 422, "text is missing"),
        (b'{"text": 5}', 422, "text is 5; a string or a list was expected"),
        (b'{"text": ["a", 5]}', 422, "text[1] is 5; a string was expected"),
        (b'{"text": "a", "beem_size": 2}', 422, "Did you mean 'beam_size'?"),
        (b'{"text": "a", "beam_size": "2"}', 422, 'beam_size is "2"; an integer was expected'),
        (
            b'{"text": "a", "beam_size": 0}',
            422,
            "beam_size is 0; a whole number of 1 or more was",
        ),
        (b'{"text": "a", "beam_size": 99}', 422, "beam_size is 99; at most 8, the limit of"),
        (b'{"text": "a", "best": 5}', 422, "best is 5, but a search with beam_size=4 finds 4"),
        (
            b'{"text": "a", "seed": 9999999999}',
            422,
            "seed is 9999999999; a whole number of 0 or more",
        ),
        (b'{"text": "a", "top_p": -1}', 422, "top_p is -1.0; a number above 0 and of 1 at most"),
        (b'{"text": "a", "timeout": 1e5}', 422, "timeout is 100000; at most 600 seconds"),
        (b'{"text": "a", "forbidden_tokens": [5, 9999]}', 422, "forbidden_tokens[1] is 9999; 0 to"),
        (b'{"text": ["a", "b"], "prefix": ["c"]}', 422, "prefix has 1 texts; 2, one for each"),
    ],
)
def test_wrong_bodies_are_refused_with_a_sentence(client, body, status, message):
    response = client.post("/v1/translate", content=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_a_sentence_that_is_too_long_is_refused_and_named(client, translating):
    status, message = error_of(translate(client, text=["a", "b " * 999], **GREEDY))
    most = translating.translator.longest - 1
    assert status == 422
    assert "text[1] has " in message and f"the model reads {most} at most" in message


def test_a_language_that_the_model_does_not_know_is_refused(translating):
    model = dataclasses.replace(translating, languages=("de", "pt_BR"))
    client = TestClient(make_app(Service(model)))
    status, message = error_of(translate(client, text="a", language="pt_Br"))
    assert status == 422 and "was not trained on. Did you mean 'pt_BR'?" in message


def test_endpoints_of_language_models_say_what_this_model_is_for(client):
    for path in ("/v1/generate", "/v1/completions"):
        status, message = error_of(client.post(path, json={"prompt": "a"}))
        assert status == 404 and message.endswith("use /v1/translate")


def test_unknown_paths_and_methods(client):
    assert error_of(client.get("/v1/translte"))[0] == 404
    status, message = error_of(client.get("/v1/translate"))
    assert (status, message) == (405, "/v1/translate does not take GET, but POST")


def test_bodies_are_not_nested_deeper_than_anything_needs(client):
    """A scalar is no list, so that a body of it alone is not deep."""
    for depth, message in ((60, "text[0] is ["), (65, "the body is nested too deeply: at most 64")):
        body = f'{{"text": {"[" * depth}{"]" * depth}}}'.encode()
        status, said = error_of(client.post("/v1/translate", content=body))
        assert status == (422 if depth == 60 else 400) and message in said
    wide = [[]] * 200
    assert "text[0] is []" in error_of(translate(client, text=wide))[1]
    assert error_of(client.post("/v1/translate", content=b"5"))[0] == 422
