# tests: wings/serving/endpoints/completions.py, wings/serving/endpoints/events.py
# tests: wings/inference/scoring.py, wings/inference/text_generator.py
"""Tests /v1/completions and /v1/generate against the text generator and against each other."""

import json

import pytest

from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.text_generator import TextGenerator

pytestmark = pytest.mark.xdist_group("serving")

PROMPT = "the"


def complete(client, **body):
    return client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 6, **body})


def parts_of(response):
    """Returns the data of the server-sent events, without the mark of the end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def written(writing, **options):
    """Returns the texts that the text generator adds to the prompt."""
    options = DecodingOptions(beam_size=1, most_tokens=6, **options)
    (text,) = TextGenerator(writing.engine, writing.vocabulary, options).write([PROMPT])
    start = len(writing.vocabulary.decode(writing.vocabulary.encode(PROMPT)))
    return [sample[start:] for sample in text.texts]


def test_choices_are_the_texts_of_the_writer(writer_client, writing):
    body = complete(writer_client, n=2, seed=5, temperature=0.8).json()
    expected = written(writing, best=2, seed=5, temperature=0.8)
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(writing.vocabulary.encode(PROMPT))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert {choice["finish_reason"] for choice in body["choices"]} <= {"stop", "length"}


def test_streamed_parts_add_up_to_the_whole_text(writer_client):
    whole = complete(writer_client, n=2, seed=5, temperature=0.8).json()
    streamed = complete(
        writer_client,
        n=2,
        seed=5,
        temperature=0.8,
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = parts_of(streamed)
    texts, reasons = ["", ""], [None, None]
    for part in parts:
        (choice,) = part["choices"]
        assert reasons[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert last["choices"] == [] and last["usage"] == whole["usage"]


def test_greedy_choices_log_probabilities_stop_and_echo(writer_client, writing):
    body = complete(writer_client, n=2, temperature=0, logprobs=1).json()
    (expected,) = written(writing)
    assert [choice["text"] for choice in body["choices"]] == [expected, expected]
    found = body["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [
        {token: value}
        for token, value in zip(found["tokens"], found["token_logprobs"], strict=True)
    ]
    assert all(value <= 0 for value in found["token_logprobs"])
    assert "".join(found["tokens"]).replace("\u2581", " ").strip() == expected.strip()
    echoed = complete(writer_client, temperature=0, echo=True).json()["choices"][0]["text"]
    assert echoed == PROMPT + expected
    stop = expected[len(expected) // 2 :]
    assert stop
    cut = complete(writer_client, temperature=0, stop=[stop]).json()["choices"][0]
    assert cut["text"] == expected.partition(stop)[0] and cut["finish_reason"] == "stop"


def test_prompts_may_be_several_texts_or_tokens(writer_client, writing):
    ids = writing.vocabulary.encode(PROMPT)
    for prompt in (ids, [PROMPT, PROMPT], [ids, ids]):
        body = complete(writer_client, prompt=prompt, temperature=0).json()
        assert {c["text"] for c in body["choices"]} == set(written(writing))


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"model": "gpt"}, 404, "model", "the model 'gpt' is not served; this server has 'tiny'"),
        ({"max_tokens": 9999}, 400, "prompt", "this model has 16 positions for both"),
        ({"max_tokens": 0}, 400, "max_tokens", "max_tokens is 0; "),
        ({"temperature": 3}, 400, "temperature", "temperature is 3; a number <= 2"),
        ({"n": "2"}, 400, "n", 'n is "2"; an integer'),
        ({"n": 99}, 400, "n", "n is 99; at most 8 was expected"),
        ({"logprobs": 3}, 400, "logprobs", "the chosen tokens only"),
        ({"best_of": 4}, 400, "best_of", "best_of is 4"),
        ({"presence_penalty": 1}, 400, "presence_penalty", "presence_penalty is not supported"),
        ({"stop": list("abcde")}, 400, "stop", "stop has more than 4 texts"),
        ({"prompt": []}, 400, "prompt", "prompt is an empty list"),
        ({"prompt": [5, "a"]}, 400, "prompt", "prompt mixes tokens with texts"),
        ({"prompt": [99999]}, 400, "prompt", "prompt has the token 99999; 0 to 279"),
        ({"promt": 5}, 400, "promt", "Did you mean 'prompt'?"),
    ],
)
def test_mistakes_are_answered_in_the_format_of_the_api(
    writer_client, fields, status, param, message
):
    response = complete(writer_client, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error" and message in error["message"]


def test_generate_streams_what_it_answers_at_once(writer_client):
    body = {"prompt": PROMPT, "most_tokens": 6, "best": 2, "seed": 3}
    whole = writer_client.post("/v1/generate", json=body | {"routing": True}).json()["texts"]
    text = writer_client.post("/v1/generate", json=body | {"stream": True}).text
    *parts, done = text.strip().split("\n\n")
    texts = ["", ""]
    for part in parts:
        value = json.loads(part.removeprefix("data: "))
        texts[value["index"]] += value["text"]
    assert texts == [one["text"] for one in whole]
    event, data = done.split("\n")
    assert event == "event: done"
    final = json.loads(data.removeprefix("data: "))["texts"]
    for one, other in zip(final, whole, strict=True):
        for token, same in zip(one["tokens"], other["tokens"], strict=True):
            assert token["text"] == same["text"]
            assert token["log_probability"] == pytest.approx(same["log_probability"], abs=1e-4)
    (layer,) = whole[0]["routing"]["layers"]
    assert layer["stack"] == "decoder" and layer["num_experts"] == 4
    for token in whole[0]["routing"]["tokens"]:
        assert 1 <= len(token["experts"][0]) <= 2


def test_a_prompt_that_is_too_long_is_refused(writer_client):
    response = writer_client.post("/v1/generate", json={"prompt": "word " * 99})
    assert response.status_code == 422
    assert "the model reads 15 at most" in response.json()["error"]["message"]
