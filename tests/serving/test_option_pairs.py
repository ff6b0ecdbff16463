# tests: wings/serving/model.py, wings/serving/endpoints/
"""Every pair of options of every endpoint: whole against streamed, and against the model itself.

Texts, tokens and offsets are those of the tokenizer alone, log-probabilities of prompts those of a
Llama in NumPy, and texts of the other endpoints those of the Python interface.
"""

import dataclasses
import json

import numpy as np
import pytest
from starlette.testclient import TestClient

import lingvo_gshard as gshard
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.wings.inference.requests import LENGTH, Hypothesis, Request
from lingvo_gshard.wings.inference.text_generator import TextGenerator
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service
from tests.data import corpora
from tests.fine_tuning.conversations import chat_models
from tests.serving import test_stops, tiny_llamas
from tests.serving.conftest import PATIENT
from tests.serving.pairs import ABSENT, all_pairs

pytestmark = pytest.mark.xdist_group("serving")

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module", params=test_stops.KINDS)
def llama(request, tmp_path_factory):
    return tiny_llamas.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama_client(llama):
    with TestClient(make_app(Service(llama.served, PATIENT))) as opened:
        yield opened


COMPLETIONS = {
    "prompt": ["a b", "", "é€a", [4, 5, 6]],
    "max_tokens": [ABSENT, 0, 1, 9],
    "temperature": [0, 0.7, 1.5],
    "top_p": [ABSENT, 0.8],
    "seed": [0, 7],
    "n": [ABSENT, 1, 3],
    "best_of": [ABSENT, 1, 3],
    "stop": [ABSENT, "b", ["a", "é"]],
    "logprobs": [ABSENT, 0, 1],
    "echo": [ABSENT, False, True],
    "user": [ABSENT, "me"],
    "presence_penalty": [ABSENT, 0],
}


def completes(body):
    """Returns whether /v1/completions takes a body."""
    if body.get("max_tokens") == 0 and not body.get("echo"):
        return False
    if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
        return False
    return body.get("logprobs") != 1 or body["temperature"] == 0 or body.get("max_tokens") == 0


def test_completions_are_right_with_every_pair_of_options(llama, llama_client):
    bodies = all_pairs(COMPLETIONS, completes)
    assert len(bodies) > 12
    for body in bodies:
        given, _ = test_stops.given_tokens(llama, body["prompt"])
        draws, most = body["temperature"] > 0, body.get("max_tokens", 16)
        options = DecodingOptions(
            beam_size=1,
            best=body.get("n", 1) if draws else 1,
            most_tokens=max(most, 1),
            temperature=body["temperature"],
            top_p=body.get("top_p", 1.0),
            seed=body["seed"],
        )
        texts = llama.served.engine.submit(Request(given=given, options=options)).result()
        texts = texts if draws else texts * body.get("n", 1)
        if not most:
            texts = (Hypothesis((), (), 0.0, LENGTH),) * len(texts)
        stop = body.get("stop", [])
        stop = [stop] if isinstance(stop, str) else stop
        found = test_stops.whole(llama_client, body)
        for choice, one in zip(found["choices"], texts, strict=True):
            right = test_stops.expected(llama, given, one, stop)
            test_stops.check_choice(llama, given, choice, right, body)
        test_stops.assert_same(test_stops.streamed(llama_client, body), found)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """Returns a served model with a chat template."""
    folder = tmp_path_factory.mktemp("chatting")
    chat_models.write(folder / "model")
    gshard.import_model(folder / "model", folder / "run", length=32)
    return ServedModel.of_run(gshard.load(folder / "run"))


CHATS = {
    "max_tokens": [ABSENT, 1, 6],
    "max_completion_tokens": [ABSENT, 4],
    "temperature": [0, 0.7, 1.5],
    "top_p": [ABSENT, 0.8],
    "seed": [0, 7],
    "n": [ABSENT, 1, 3],
    "stop": [ABSENT, "w9", [" w7", "w11"]],
    "logprobs": [ABSENT, False, True],
    "top_logprobs": [ABSENT, 0, 1],
    "stop_token_ids": [ABSENT, [9, 12]],
    "add_generation_prompt": [ABSENT, False],
    "user": [ABSENT, "me"],
}


def chats(body):
    """Returns whether /v1/chat/completions takes a body."""
    top = body.get("top_logprobs", 0)
    return not top or (bool(body.get("logprobs")) and body["temperature"] == 0)


def joined_chat(response):
    """Returns the choices of a streamed conversation as those of a whole answer."""
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    usage = parts.pop()["usage"]
    choices = {}
    for (part,) in (part["choices"] for part in parts):
        empty = {"content": "", "finish_reason": None, "logprobs": None, "seed": None}
        choice = choices.setdefault(part["index"], empty)
        assert choice["finish_reason"] is None
        choice["content"] += part["delta"].get("content", "")
        choice["finish_reason"], choice["seed"] = part["finish_reason"], part.get("seed")
        if part["logprobs"]:
            choice["logprobs"] = (choice["logprobs"] or []) + part["logprobs"]["content"]
    return [choices[index] for index in sorted(choices)], usage


def test_chats_are_right_with_every_pair_of_options(chatting):
    messages = [{"role": "user", "content": "w6 w7"}]
    stops = {"end": "stop", "stop": "stop", "length": "length"}
    with TestClient(make_app(Service(chatting, PATIENT))) as client:
        for body in all_pairs(CHATS, chats):
            asked = {"messages": messages, **body}
            whole = client.post(CHAT, json=asked)
            assert whole.status_code == 200, whole.text
            wanted = {"stream": True, "stream_options": {"include_usage": True}}
            streamed, usage = joined_chat(client.post(CHAT, json=asked | wanted))
            assert usage == whole.json()["usage"]
            given = [1, 4, 6, 7, 3] + ([5] if body.get("add_generation_prompt", True) else [])
            draws = body["temperature"] > 0
            most = body.get("max_completion_tokens") or body.get("max_tokens") or 32 - len(given)
            ends = {2, 3, *body.get("stop_token_ids", ())}
            stop = body.get("stop", [])
            stop = [stop] if isinstance(stop, str) else stop
            options = DecodingOptions(
                beam_size=1,
                best=body.get("n", 1) if draws else 1,
                most_tokens=most,
                temperature=body["temperature"],
                top_p=body.get("top_p", 1.0),
                seed=body["seed"],
            )
            texts = chatting.engine.submit(Request(given=given, options=options)).result()
            texts = texts if draws else texts * body.get("n", 1)
            choices = whole.json()["choices"]
            for choice, part, found in zip(choices, streamed, texts, strict=True):
                assert choice["message"]["content"] == part["content"]
                for name in ("finish_reason", "seed"):
                    assert choice.get(name) == part[name]
                assert choice.get("seed") == (body["seed"] if draws else None)
                check_chat(chatting, choice, part, found, ends, stop, stops[found.reason], body)


def check_chat(chatting, choice, part, found, ends, stop, reason, body):
    """Raises AssertionError if an answer is not that of the tokens, cut by hand."""
    tokens = [*found.tokens] + ([] if found.end is None else [found.end])
    for count in range(1, len(tokens) + 1):
        text = chatting.vocabulary.text_of([t for t in tokens[:count] if t not in ends])
        has_stop = any(one in text for one in stop)
        if tokens[count - 1] in ends or has_stop:
            tokens, reason = tokens[:count], "stop"
            break
    text = chatting.vocabulary.text_of([t for t in tokens if t not in ends])
    for one in sorted(stop, key=lambda one: text.find(one) if one in text else len(text)):
        text = text.partition(one)[0]
    assert choice["message"]["content"] == text and choice["finish_reason"] == reason
    assert (choice["logprobs"] is None) == (not body.get("logprobs"))
    if body.get("logprobs"):
        content = choice["logprobs"]["content"]
        for each, same, token in zip(content, part["logprobs"], tokens, strict=True):
            assert each["token"] == same["token"] == chatting.vocabulary.piece(token)
            assert len(each["top_logprobs"]) == len(same["top_logprobs"])
            assert len(each["top_logprobs"]) == (body.get("top_logprobs") or 0)
        values = [each["logprob"] for each in content]
        np.testing.assert_allclose(values, found.log_probabilities[: len(tokens)], atol=1e-3)


OWN = {
    "best": [ABSENT, 2],
    "beam_size": [ABSENT, 1, 3],
    "temperature": [ABSENT, 0, 0.7],
    "seed": [0, 7],
    "top_k": [ABSENT, 3],
    "top_p": [ABSENT, 0.8],
    "min_p": [ABSENT, 0.1],
    "most_tokens": [ABSENT, 5],
    "least_tokens": [ABSENT, 3],
    "length_exponent": [ABSENT, 0.5],
    "forbidden_tokens": [ABSENT, [7]],
    "allowed_tokens": [ABSENT, [5, 6, 8, 9, 10, 11]],
    "stop": [ABSENT, "e", ["a", "o"]],
    "routing": [ABSENT, True],
}


def has_options(usual, body):
    """Returns whether options go together."""
    try:
        options = options_of(usual, body)
    except ValueError:
        return False
    return options.draws or not set(body) & {"top_k", "top_p", "min_p"}


def options_of(usual, body):
    """Returns the options that a body asks for."""
    fields = {name: value for name, value in body.items() if name in vars(usual)}
    for name in ("stop", "forbidden_tokens", "allowed_tokens"):
        if name in fields:
            value = fields[name]
            fields[name] = (value,) if isinstance(value, str) else tuple(value)
    return dataclasses.replace(usual, **fields)


@pytest.mark.slow
def test_generated_texts_are_right_with_every_pair_of_options(writer_client, writing):
    for body in all_pairs(OWN, lambda body: has_options(DRAWING, body)):
        options = options_of(DRAWING, body)
        (text,) = TextGenerator(writing.engine, writing.vocabulary, options).write(["the"])
        whole = writer_client.post("/v1/generate", json={"prompt": "the", **body})
        assert whole.status_code == 200, whole.text
        found = whole.json()
        assert ["the" + one["text"] for one in found["texts"]] == text.texts
        assert found.get("seed") == (body["seed"] if options.draws else None)
        for one in found["texts"]:
            assert ("routing" in one) == body.get("routing", False)
        if options.beam_size > 1:
            continue
        response = writer_client.post(
            "/v1/generate", json={"prompt": "the", **body, "stream": True}
        )
        *parts, done = response.text.strip().split("\n\n")
        texts = [""] * len(found["texts"])
        for part in parts:
            value = json.loads(part.removeprefix("data: "))
            texts[value["index"]] += value["text"]
        assert texts == [one["text"] for one in found["texts"]]
        final = json.loads(done.removeprefix("event: done\ndata: "))
        assert final.get("seed") == found.get("seed")
        for one, same in zip(final["texts"], found["texts"], strict=True):
            assert {**one, "tokens": [], "score": 0} == {**same, "tokens": [], "score": 0}


@pytest.mark.slow
def test_translations_are_right_with_every_pair_of_options(client, translating):
    sources = [row.source for row in corpora.rows(3)]
    usual = DecodingOptions()
    for body in all_pairs(OWN, lambda body: has_options(usual, body)):
        options = options_of(usual, body)
        expected = translating.translator.translate(sources, options=options)
        response = client.post("/v1/translate", json={"text": sources, **body})
        assert response.status_code == 200, response.text
        found = response.json()["translations"]
        assert [one["text"] for one in found] == expected.texts
        for one, best in zip(found, expected.best, strict=True):
            assert [each["text"] for each in one["alternatives"]] == [each.text for each in best]
            assert one.get("seed") == (body["seed"] if options.draws else None)
            for each in one["alternatives"]:
                assert ("routing" in each) == body.get("routing", False)
