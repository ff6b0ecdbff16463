# tests: wings/serving/endpoints/chat.py, wings/serving/openapi.py
# tests: wings/serving/endpoints/events.py
"""Tests /v1/chat/completions, scores of given tokens, and what describes the server."""

import dataclasses
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
from starlette.testclient import TestClient

import lingvo_gshard as gshard
from benchmarks.peer_python import find_python
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.serving import openapi
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service
from tests.fine_tuning.conversations import chat_models
from tests.open_models import llama_reference
from tests.serving.conftest import PATIENT
from tests.serving.open_server import open_server

pytestmark = pytest.mark.xdist_group("serving")

MESSAGES = [{"role": "user", "content": "w6 w7"}]
# <s> w4 w6 w7 <end> w5, as the template writes the messages.
GIVEN = [1, 4, 6, 7, 3, 5]
PATH = "/v1/chat/completions"
OPENAI = pathlib.Path(__file__).with_name("openai_process.py")


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """Returns (a served model with a chat template, its tensors)."""
    folder = tmp_path_factory.mktemp("chatting")
    tensors = chat_models.write(folder / "model")
    gshard.import_model(folder / "model", folder / "run", length=32)
    return ServedModel.of_run(gshard.load(folder / "run")), tensors


@pytest.fixture
def client(chatting):
    app = make_app(Service(chatting[0], PATIENT))
    with TestClient(app, raise_server_exceptions=False) as opened:
        yield opened


def greedy(tensors, ids, most):
    """Returns the tokens that the NumPy model finds likeliest after others, and their values."""
    ids, values, first = list(ids), [], len(ids)
    while len(ids) < first + most and (len(ids) == first or ids[-1] not in (2, 3)):
        logits = llama_reference.logits(tensors, ids)[-1]
        values.append(logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        ids.append(int(logits.argmax()))
    return ids[first:], values


def test_an_answer_continues_what_the_template_writes(client, chatting):
    served, tensors = chatting
    tokens, values = greedy(tensors, GIVEN, 6)
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "logprobs": True}
    found = client.post(PATH, json=body | {"top_logprobs": 1}).json()
    (choice,) = found["choices"]
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    assert choice["message"]["content"] == served.vocabulary.text_of(tokens)
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [served.vocabulary.piece(t) for t in tokens]
    np.testing.assert_allclose([each["logprob"] for each in content], values, atol=1e-3)
    assert choice["finish_reason"] == ("stop" if tokens[-1] in (2, 3) else "length")
    before = len(served.vocabulary.before)
    assert found["usage"]["prompt_tokens"] == len(GIVEN) - before
    parts = [{"type": "text", "text": "w6"}, {"type": "text", "text": " w7"}]
    again = client.post(PATH, json=body | {"messages": [{"role": "user", "content": parts}]}).json()
    assert again["choices"][0]["message"] == choice["message"]


def test_streamed_parts_are_those_of_the_whole_answer(client):
    body = {"messages": MESSAGES, "max_tokens": 6, "n": 2, "seed": 5}
    whole = client.post(PATH, json=body).json()
    text = client.post(
        PATH, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ).text
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    *parts, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    texts, reasons, roles = ["", ""], [None, None], [None, None]
    for part in parts:
        assert part["object"] == "chat.completion.chunk" and part["id"] == last["id"]
        (choice,) = part["choices"]
        index = choice["index"]
        texts[index] += choice["delta"].get("content", "")
        roles[index] = roles[index] or choice["delta"].get("role")
        reasons[index] = choice["finish_reason"]
    assert roles == ["assistant"] * 2
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert last["usage"] == whole["usage"]


def test_tokens_end_an_answer(client, chatting):
    served, tensors = chatting
    tokens, _ = greedy(tensors, GIVEN, 6)
    body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    stop = next(token for token in tokens if token not in (2, 3))
    place = tokens.index(stop)
    (choice,) = client.post(PATH, json=body | {"stop_token_ids": [stop]}).json()["choices"]
    assert choice["message"]["content"] == served.vocabulary.text_of(tokens[:place])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "status", "param", "code", "message"),
    [
        ({"model": "x"}, 404, "model", "model_not_found", "'x' is not served"),
        ({"messages": []}, 400, "messages", None, "one message or more"),
        ({"messages": [{"content": "a"}]}, 400, "messages[0].role", None, "role is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0]",
            None,
            "has the type 'image_url'; this model reads text only",
        ),
        ({"max_tokens": 99}, 400, "messages", "context_length_exceeded", "32 positions for both"),
        ({"tool_choice": "required"}, 400, "tool_choice", None, "not supported by this server"),
        ({"top_logprobs": 1}, 400, "top_logprobs", None, "needs logprobs=true"),
        ({"temprature": 1}, 400, "temprature", "unknown_parameter", "Did you mean 'temperature'"),
        ({"temperature": "x"}, 400, "temperature", "invalid_type", 'temperature is "x"; a number'),
        ({"messages": 5}, 400, "messages", "invalid_type", "messages is 5; a list"),
    ],
)
def test_mistakes_are_told(client, fields, status, param, code, message):
    response = client.post(PATH, json={"messages": MESSAGES, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert message in error["message"]


def test_a_template_may_refuse_and_a_model_may_have_none(chatting, writer_client):
    served, _ = chatting
    refusing = ChatTemplate("{{ raise_exception('no system role') }}", {}, "here")
    app = make_app(Service(dataclasses.replace(served, template=refusing), PATIENT))
    with TestClient(app) as opened:
        error = opened.post(PATH, json={"messages": MESSAGES}).json()["error"]
    assert error["message"].endswith("no system role") and error["param"] == "messages"
    error = writer_client.post(PATH, json={"messages": MESSAGES}).json()["error"]
    assert "no chat template; use /v1/completions" in error["message"]


@pytest.mark.parametrize("depth", [110, 334, 600, 990, 5000])
def test_a_value_that_is_nested_deeply_is_told(client, depth):
    for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        for fields in (
            f'"messages": [{{"role": "user", "content": "w6", "x": {nested}}}]',
            f'"messages": [{{"role": "user", "content": "w6"}}], "tools": [{{"a": {nested}}}]',
            f'"messages": [{{"role": "a"}}], "chat_template_kwargs": {{"a": {nested}}}',
        ):
            response = client.post(PATH, content=f"{{{fields}}}")
            assert response.status_code == 400, fields[:60]
            assert "nested" in response.json()["error"]["message"]


def test_echo_has_the_scores_of_the_prompt(client, chatting):
    served, tensors = chatting
    ids = [6, 7, 8, 9]
    logits = llama_reference.logits(tensors, [1, *ids])
    shares = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [shares[i, token] for i, token in enumerate(ids)]
    body = {"prompt": "w6 w7 w8 w9", "echo": True, "logprobs": 1, "temperature": 0}
    (choice,) = client.post("/v1/completions", json=body | {"max_tokens": 0}).json()["choices"]
    scored = choice["logprobs"]
    assert choice["text"] == "w6 w7 w8 w9" and scored["tokens"] == ["w6", "w7", "w8", "w9"]
    np.testing.assert_allclose(scored["token_logprobs"], expected, atol=1e-3)
    for place, top in enumerate(scored["top_logprobs"]):
        best = int(shares[place].argmax())
        assert max(top, key=top.get) == served.vocabulary.piece(best)
        assert max(top.values()) == pytest.approx(shares[place].max(), abs=1e-3)
    (longer,) = client.post("/v1/completions", json=body | {"max_tokens": 2}).json()["choices"]
    assert longer["logprobs"]["token_logprobs"][:4] == scored["token_logprobs"]
    assert len(longer["logprobs"]["tokens"]) == len(longer["logprobs"]["text_offset"]) == 6
    # Tokens that begin with the start of all texts are scored from there on.
    given = body | {"prompt": [1, *ids], "max_tokens": 0}
    (choice,) = client.post("/v1/completions", json=given).json()["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, *scored["token_logprobs"]]
    error = client.post("/v1/completions", json={"prompt": "w6", "max_tokens": 0}).json()["error"]
    assert "1 or more was expected, or echo" in error["message"]


def test_the_interface_describes_itself(client, chatting):
    served, _ = chatting
    found = client.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1") and served.name in found["info"]["title"]
    assert found["paths"].keys() == openapi.OPERATIONS.keys()
    for path, methods in found["paths"].items():
        concrete = path.replace("{model}", served.name)
        for method in methods:
            response = client.request(method.upper(), concrete, content=b"{}")
            assert response.status_code in (200, 400, 404, 422), concrete
            assert response.status_code == 200 or "error" in response.json()
    fields = found["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "stop_token_ids"} <= fields.keys()
    (listed,) = client.get("/v1/models").json()["data"]
    assert client.get(f"/v1/models/{served.name}").json() == listed
    missing = client.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    unknown = client.get("/v1/nothing").json()["error"]
    assert unknown["code"] == "unknown_path" and PATH in unknown["message"]
    wrong = client.get(PATH)
    assert wrong.status_code == 405 and "POST" in wrong.json()["error"]["message"]


def test_openais_client_reads_all_answers(chatting, tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), ("openai",))
    if not python:
        pytest.skip("openai is not installed, and PEERS_PYTHON names no Python with it")
    served, tensors = chatting
    with open_server(Service(served, PATIENT)) as opened:
        url = f"http://127.0.0.1:{opened.port}/v1"
        subprocess.run([python, OPENAI, url, tmp_path / "answers.json"], check=True)
    found = json.loads((tmp_path / "answers.json").read_text())
    tokens, _ = greedy(tensors, GIVEN, 6)
    assert found["text"] == found["streamed"] == served.vocabulary.text_of(tokens)
    assert found["tokens"] == [served.vocabulary.piece(token) for token in tokens]
    assert found["role"] == found["streamed_role"] == "assistant"
    assert found["reason"] == found["streamed_reason"]
    assert found["usage"] == found["streamed_usage"]
    assert len(found["drawn"]) == 2 and found["model"]["id"] == served.name
    assert found["scored"]["logprobs"]["tokens"] == ["w6", "w7", "w8"]
    kinds = [error["kind"] for error in found["errors"]]
    assert kinds == ["NotFoundError", *["BadRequestError"] * 4, "NotFoundError"]
    codes = [error["code"] for error in found["errors"]]
    expected = ["model_not_found", None, "context_length_exceeded", "invalid_value"]
    assert codes == [*expected, "unknown_parameter", "unknown_path"]
    assert [error["param"] for error in found["errors"]][1:5] == [
        "messages",
        "messages",
        "top_p",
        "topp",
    ]
