# tests: wings/inference/text.py, wings/serving/endpoints/generate.py
"""Tests where texts end: stop strings, several end ids, and characters of several tokens."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from starlette.testclient import TestClient

from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Hypothesis, Request
from lingvo_gshard.wings.inference.text import GrowingText, continuation, echo
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.service import Service
from tests.open_models import llama_reference
from tests.serving import tiny_llamas
from tests.serving.conftest import PATIENT
from tests.serving.tiny_llamas import BOS, END, EOS, SIZE, TinyLlama

KINDS = ("sentencepiece", "bytes")
ALPHABET = "ab .é€\n"
REASONS = {"end": "stop", "stop": "stop", "length": "length"}
Ask = Callable[..., dict]


@pytest.fixture(scope="module", params=KINDS)
def llama(request, tmp_path_factory):
    return tiny_llamas.make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def client(llama):
    with TestClient(make_app(Service(llama.served, PATIENT))) as opened:
        yield opened


def added(llama: TinyLlama, given: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the text that tokens add, by the tokenizer alone."""
    before, whole = map(llama.tokenizer.decode, ([*given], [*given, *tokens]))
    return whole[len(os.path.commonprefix([before, whole])) :]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a choice must be, from the tokens of the same request without stop strings."""

    text: str
    reason: str
    tokens: list[int]
    log_probabilities: list[float]


def expected(
    llama: TinyLlama, given: Sequence[int], found: Hypothesis, stop: Sequence[str]
) -> Expected:
    """Returns the choice: it ends with the first token after which its text has a stop string."""
    for count in range(1, len(found.tokens) + 1):
        text = added(llama, given, found.tokens[:count])
        places = [text.index(one) for one in stop if one in text]
        if places:
            kept = list(found.tokens[:count]), list(found.log_probabilities[:count])
            return Expected(text[: min(places)], "stop", *kept)
    tokens = [*found.tokens] if found.end is None else [*found.tokens, found.end]
    text = added(llama, given, found.tokens)
    return Expected(text, REASONS[found.reason], tokens, list(found.log_probabilities))


def whole(client: TestClient, body: dict) -> dict:
    """Returns an answer that is not streamed: choices, and the usage."""
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return {name: response.json()[name] for name in ("choices", "usage")}


def streamed(client: TestClient, body: dict) -> dict:
    """Returns a streamed answer, its parts joined to what is not streamed."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/completions", json=body | options)
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    *parts, last = (json.loads(event.removeprefix("data: ")) for event in events[:-2])
    choices: dict[int, dict] = {}
    for (part,) in (part["choices"] for part in parts):
        choice = choices.setdefault(
            part["index"],
            {"index": part["index"], "text": "", "finish_reason": None, "logprobs": None},
        )
        assert choice["finish_reason"] is None
        choice["text"] += part["text"]
        choice["finish_reason"] = part["finish_reason"]
        if part["logprobs"] and choice["logprobs"]:
            for name, values in part["logprobs"].items():
                before = choice["logprobs"][name]
                choice["logprobs"][name] = None if before is None else [*before, *values]
        elif part["logprobs"]:
            choice["logprobs"] = part["logprobs"]
    return {"choices": [choices[i] for i in sorted(choices)], "usage": last["usage"]}


def assert_same(found: dict, other: dict) -> None:
    """Raises AssertionError if answers differ by more than the rounding of log-probabilities."""
    assert found["usage"] == other["usage"]
    for one, same in zip(found["choices"], other["choices"], strict=True):
        for name in ("index", "text", "finish_reason"):
            assert one[name] == same[name]
        assert (one["logprobs"] is None) == (same["logprobs"] is None)
        if one["logprobs"]:
            for name in ("tokens", "text_offset"):
                assert one["logprobs"][name] == same["logprobs"][name]
            # The first token of a prompt has none.
            values, others = (
                np.array(each["logprobs"]["token_logprobs"], float) for each in (one, same)
            )
            np.testing.assert_allclose(values, others, atol=1e-3)


@st.composite
def bodies(draw: st.DrawFn) -> dict:
    """Draws a request to /v1/completions."""
    texts = st.text(ALPHABET, max_size=6)
    prompt = draw(texts | st.lists(st.integers(0, 21), min_size=1, max_size=6))
    body = {
        "prompt": prompt,
        "max_tokens": draw(st.integers(1, 22)),
        "temperature": draw(st.sampled_from([0, 0.7, 1.5])),
        "top_p": draw(st.sampled_from([1, 0.8])),
        "seed": draw(st.integers(0, 99)),
        "n": draw(st.integers(1, 3)),
    }
    stop = st.text(ALPHABET, min_size=1, max_size=3)
    body["stop"] = draw(st.lists(stop, max_size=3))
    if draw(st.booleans()):
        body["logprobs"] = draw(st.integers(0, 1)) if body["temperature"] == 0 else 0
    body["echo"] = draw(st.booleans())
    return body


def others(llama: TinyLlama, count: int) -> None:
    """Begins other texts of several lengths, which are decoded with the next ones."""
    greedy = DecodingOptions(beam_size=1, most_tokens=17)
    drawn = dataclasses.replace(greedy, temperature=1.0, seed=count)
    llama.served.engine.submit_all(
        Request(given=(BOS, *range(4, 5 + i % 9)), options=(greedy, drawn)[i % 2])
        for i in range(count)
    )


def check_completion(
    llama: TinyLlama,
    client: TestClient,
    body: dict,
    neighbors: int,
    parts: Sequence[tuple[int, int]] = (),
) -> None:
    """Raises AssertionError if a request is answered wrongly, in any of four ways.

    Args:
      llama: the model.
      client: of its server.
      body: the request.
      neighbors: the number of other texts that are decoded with it.
      parts: first character and length of parts of the answer that are stop strings, too.
    """
    given, _ = given_tokens(llama, body["prompt"])
    draws = body["temperature"] > 0
    options = DecodingOptions(
        beam_size=1,
        best=body["n"] if draws else 1,
        most_tokens=body["max_tokens"],
        **{name: body[name] for name in ("temperature", "seed")},
        top_p=body["top_p"],
    )
    texts = llama.served.engine.submit(Request(given=given, options=options)).result()
    texts = texts if draws else texts * body["n"]
    text = added(llama, given, texts[0].tokens)
    firsts = [(first % max(len(text), 1), length) for first, length in parts]
    found = [text[first : first + length] for first, length in firsts]
    # What the prompt's last bytes become may also be such a character of the answer.
    body["stop"] += [one for one in found if one and not ("\ufffd" in one and body.get("echo"))]
    found = whole(client, body)
    for choice, hypothesis_ in zip(found["choices"], texts, strict=True):
        check_choice(llama, given, choice, expected(llama, given, hypothesis_, body["stop"]), body)
    assert_same(streamed(client, body), found)
    others(llama, neighbors)
    assert_same(whole(client, body), found)
    others(llama, neighbors)
    assert_same(streamed(client, body), found)


def given_tokens(llama: TinyLlama, prompt: str | list[int]) -> tuple[list[int], int]:
    """Returns the tokens that a model is given for a prompt, and how many the server has added."""
    ids = prompt
    if isinstance(ids, str):
        ids = llama.tokenizer.encode(ids, add_special_tokens=False).ids
    has_start = bool(llama.bos) and tuple(ids[:1]) == llama.bos
    given = list(ids) if has_start else [*llama.bos, *ids] or [BOS]
    return given, len(given) - len(ids)


def check_choice(
    llama: TinyLlama, given: Sequence[int], choice: dict, right: Expected, body: dict
) -> None:
    """Raises AssertionError if a choice is not as the tokens of its request say."""
    text, shown = choice["text"], ""
    assert choice.get("seed") == (body["seed"] if body["temperature"] > 0 else None)
    if body.get("echo"):
        shown = llama.tokenizer.decode(list(given)).rstrip("\ufffd")
        assert text.startswith(shown)
        text = text[len(shown) :]
        assert text.endswith(right.text) and set(text.removesuffix(right.text)) <= {"\ufffd"}
    else:
        assert text == right.text
    assert choice["finish_reason"] == right.reason
    if "logprobs" not in body:
        assert choice["logprobs"] is None
        return
    logprobs = choice["logprobs"]
    if body.get("echo"):
        logprobs = check_echoed(llama, given, logprobs, body)
    pieces = list(map(llama.served.vocabulary.piece, right.tokens))
    assert logprobs["tokens"] == pieces
    np.testing.assert_allclose(logprobs["token_logprobs"], right.log_probabilities, atol=1e-3)
    if body["logprobs"] == 1:
        values = logprobs["token_logprobs"]
        pairs = zip(pieces, values, strict=True)
        assert logprobs["top_logprobs"] == [{piece: value} for piece, value in pairs]
    check_offsets(llama, given, right.tokens, logprobs["text_offset"], shown)


def check_offsets(
    llama: TinyLlama,
    given: Sequence[int],
    tokens: Sequence[int],
    offsets: Sequence[int],
    shown: str,
) -> None:
    """Raises AssertionError if tokens begin elsewhere; `shown` is the text of `given` before."""
    assert list(offsets) == sorted(offsets)
    for count, offset in enumerate(offsets):
        # Whatever follows, the text before an offset stays.
        texts = [
            added(llama, given, [*tokens[:count], *more])
            for more in ([], *([index] for index in range(4, llama.served.vocabulary.size)))
        ]
        kept = len(shown) + len(os.path.commonprefix(texts))
        assert offset == kept or (offset < kept and "\ufffd" in texts[0])


def check_echoed(llama: TinyLlama, given: Sequence[int], logprobs: dict, body: dict) -> dict:
    """Raises AssertionError if the scores of a prompt are wrong; returns those after it."""
    first = given_tokens(llama, body["prompt"])[1]
    count = len(given) - first
    echoed = {name: values and values[:count] for name, values in logprobs.items()}
    names = [llama.served.vocabulary.piece(token) for token in given[first:]]
    found = [name for name in echoed["tokens"] if not name.startswith("token_id:")]
    assert len(echoed["tokens"]) == count and set(found) <= set(names)
    logits = llama_reference.logits(llama.tensors, list(given))
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    values = [float(logits[place - 1, given[place]]) for place in range(max(first, 1), len(given))]
    assert (None in echoed["token_logprobs"]) == (first == 0)
    scores = [value for value in echoed["token_logprobs"] if value is not None]
    np.testing.assert_allclose(scores, values, atol=1e-3)
    check_offsets(llama, given[:first], given[first:], echoed["text_offset"], "")
    return {name: values and values[count:] for name, values in logprobs.items()}


def test_a_prompt_may_have_the_id_before_all_texts(llama, client):
    ids = llama.tokenizer.encode("a b", add_special_tokens=False).ids
    prompts = ["a b", ids] + (["<s>a b", [BOS, *ids]] if llama.bos else [])
    body = {"prompt": prompts, "max_tokens": 9, "temperature": 0, "logprobs": 0}
    found = whole(client, body)
    assert found["usage"]["prompt_tokens"] == len(prompts) * len(ids)
    for choice in found["choices"]:
        assert choice | {"index": 0} == found["choices"][0]
    given = llama.served.vocabulary.begin(ids)
    assert given == (*llama.bos, *ids) == llama.served.vocabulary.begin(given)
    # One position fewer than the model has for the prompt and new tokens.
    body |= {"prompt": [[*llama.bos, *[ids[0]] * 31]], "max_tokens": 1}
    assert whole(client, body)["usage"]["total_tokens"] == 32


@pytest.mark.slow
def test_a_prompt_may_have_ids_that_end_texts(llama, client):
    """As those of chats do, after each turn."""
    vocabulary = llama.served.vocabulary
    ids = [*llama.bos, *vocabulary.encode("a"), END, *vocabulary.encode(" b"), EOS]
    body = {"prompt": ids, "max_tokens": 12, "temperature": 1.5, "seed": 1}
    (choice,) = whole(client, body)["choices"]
    options = DecodingOptions(beam_size=1, most_tokens=12, temperature=1.5, seed=1)
    (found,) = llama.served.engine.submit(Request(given=ids, options=options)).result()
    assert choice["text"] == added(llama, ids, found.tokens) != ""
    assert streamed(client, body)["choices"] == [choice]
    echoed = whole(client, body | {"echo": True})["choices"][0]["text"]
    assert echoed == llama.tokenizer.decode(ids) + choice["text"]


@pytest.mark.parametrize("prompt", ["b", "b "])
def test_a_stop_string_may_begin_with_the_space_of_the_first_piece(llama, client, prompt):
    piece = next(i for i in range(SIZE) if llama.served.vocabulary.piece(i) == "▁a")
    body = {"prompt": prompt, "allowed_tokens": [piece], "stop": " a", "most_tokens": 9}
    body |= {"temperature": 0, "least_tokens": 9}
    (text,) = client.post("/v1/generate", json=body).json()["texts"]
    assert (text["text"], text["reason"], len(text["tokens"])) == ("", "stop", 1)


def test_a_character_that_a_prompt_begins_belongs_to_the_answer(llama, client):
    """The last bytes of a character are allowed alone."""
    pieces = ("<0xC3>", "<0xA9>") if llama.bos else ("Ã", "©")
    first, last = map(llama.tokenizer.token_to_id, pieces)
    options = DecodingOptions(beam_size=1, most_tokens=1, allowed_tokens=(last,), least_tokens=1)
    options = dataclasses.replace(options, forbidden_tokens=(EOS, END))
    given = llama.served.vocabulary.begin([11, first])
    (found,) = llama.served.engine.submit(Request(given=given, options=options)).result()
    assert found.tokens == (last,)
    vocabulary = llama.served.vocabulary
    assert continuation(vocabulary, given, found.tokens, ()) == "é"
    assert echo(vocabulary, given) == llama.tokenizer.decode([11])
    growing = GrowingText(vocabulary, given)
    assert growing.add(found.tokens) + growing.add((), is_last=True) == "é"


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 400), ("/v1/generate", 422)])
def test_an_empty_stop_string_is_refused(client, path, status):
    for stop, field in (([".", ""], "stop[1]"), ("", "stop")):
        response = client.post(path, json={"prompt": "a", "stop": stop})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, field)
        assert error["message"] == f'{field} is ""; a string of length >= 1 was expected'
    with pytest.raises(ValueError, match=re.escape("stop[1] is empty, which every text contains")):
        DecodingOptions(beam_size=1, stop=(".", ""))


def test_tokens_after_a_stop_are_counted_nowhere(llama, client):
    body = {"prompt": "ab", "max_tokens": 20, "temperature": 0, "logprobs": 0}
    (choice,) = whole(client, body)["choices"]
    text, tokens = choice["text"], choice["logprobs"]["tokens"]
    stop = text[len(text) // 2 - 1 : len(text) // 2 + 1]
    before = client.get("/metrics").text
    found = whole(client, body | {"stop": stop})
    (cut,) = found["choices"]
    count = len(cut["logprobs"]["tokens"])
    assert found["usage"]["completion_tokens"] == count < len(tokens)
    assert cut["logprobs"]["tokens"] == tokens[:count]
    after = client.get("/metrics").text
    assert tokens_of(after) - tokens_of(before) == count


def tokens_of(metrics: str) -> int:
    """Returns the number of generated tokens among metrics."""
    (value,) = re.findall(r"^\S*tokens_total (\S+)$", metrics, re.MULTILINE)
    return int(float(value))


@pytest.mark.parametrize("stop", [[" a"], ["b", " "], ["é"], ["a\n"]], ids=str)
def test_stop_strings_end_texts_of_one_temperature(llama, client, stop):
    body = {"prompt": "a b", "max_tokens": 22, "top_p": 1, "n": 3, "seed": 4, "logprobs": 0}
    check_completion(llama, client, body | {"temperature": 1.5, "stop": stop}, 7)


PARTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=1)


@hypothesis.given(body=bodies(), neighbors=st.integers(0, 12), parts=PARTS)
@hypothesis.settings(max_examples=20, suppress_health_check=list(hypothesis.HealthCheck))
def test_completions_are_the_same_streamed_whole_alone_and_among_others(
    llama, client, body, neighbors, parts
):
    check_completion(llama, client, body, neighbors, parts)


@pytest.mark.slow
@hypothesis.given(body=bodies(), neighbors=st.integers(0, 12), parts=PARTS)
@hypothesis.settings(max_examples=2000, suppress_health_check=list(hypothesis.HealthCheck))
def test_many_completions_are_the_same(llama, client, body, neighbors, parts):
    check_completion(llama, client, body, neighbors, parts)
