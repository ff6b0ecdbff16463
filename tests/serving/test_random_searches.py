# tests: wings/serving/endpoints/generate.py, wings/inference/decoding/beam.py
# tests: wings/inference/decoding/sampling.py, wings/inference/text.py
"""Compares searches of random requests with a Llama in NumPy, streamed and not, alone and not."""

import dataclasses
import functools
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from starlette.testclient import TestClient

from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Hypothesis, Request
from lingvo_gshard.wings.serving.app import make_app
from lingvo_gshard.wings.serving.service import Service
from tests.open_models import llama_reference
from tests.serving import tiny_llamas
from tests.serving.conftest import PATIENT
from tests.serving.tiny_llamas import BOS, END, EOS, SIZE, UNKNOWN, TinyLlama

ENDS = (EOS, END)
# Larger than the rounding of logits, which are about 10.
CLOSE = 1e-3
BEAM = 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llamas.make(tmp_path_factory.mktemp("llama"), "sentencepiece")


@pytest.fixture(scope="module")
def client(llama):
    with TestClient(make_app(Service(llama.served, PATIENT))) as opened:
        yield opened


class Reference:
    """The next token's log-probabilities, computed without caches, programs and batches."""

    def __init__(self, llama: TinyLlama):
        self._tensors = llama.tensors
        self.after = functools.lru_cache(20_000)(self._after)

    def _after(self, ids: tuple[int, ...]) -> np.ndarray:
        """Returns log-probabilities [V] of the token after some ids."""
        logits = llama_reference.logits(self._tensors, list(ids))[-1]
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def allowed(self, options: DecodingOptions, place: int) -> np.ndarray:
        """Returns bool [V]: the tokens that may be chosen as number `place` of a text, from 0."""
        found = np.isin(np.arange(SIZE), [*(options.allowed_tokens or range(SIZE)), *ENDS])
        found &= ~np.isin(np.arange(SIZE), options.forbidden_tokens)
        return found & ~(np.isin(np.arange(SIZE), ENDS) & (place + 1 < options.least_tokens))

    def choosable(self, given: tuple[int, ...], options: DecodingOptions, place: int) -> np.ndarray:
        """Returns the log-probabilities [V] of the tokens that may follow, others as -inf."""
        return np.where(self.allowed(options, place), self.after(given), -np.inf)

    def beam(self, given: tuple[int, ...], options: DecodingOptions) -> list[tuple[float, tuple]]:
        """Returns (rank, tokens) of a beam search that never stops early, the best first."""
        beam, ended = [(0.0, ())], []

        def rank(gain: float, length: int) -> float:
            return gain / ((5 + length) / 6) ** options.length_exponent

        for place in range(options.most_tokens):
            grown = [
                (gain + value, (*tokens, token))
                for gain, tokens in beam
                for token, value in enumerate(self.choosable((*given, *tokens), options, place))
                if np.isfinite(value)
            ]
            grown.sort(reverse=True)
            ended += [(rank(g, place + 1), t) for g, t in grown[:BEAM] if t[-1] in ENDS]
            beam = [(g, t) for g, t in grown if t[-1] not in ENDS][:BEAM]
        ended += [(rank(g, options.most_tokens), t) for g, t in beam]
        return sorted(ended, reverse=True)[:BEAM]


@pytest.fixture(scope="module")
def reference(llama):
    return Reference(llama)


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[int], DecodingOptions]:
    """Draws a prompt of tokens and options. All forbid UNKNOWN, so that few programs are needed."""
    ids = st.integers(1, SIZE - 1)
    prompt = [BOS, *draw(st.lists(ids, max_size=6))]
    most = draw(st.integers(1, 12))
    values = {
        "most_tokens": most,
        "least_tokens": draw(st.just(0) | st.integers(0, most)),
        "allowed_tokens": tuple(draw(st.just([]) | st.lists(ids, min_size=4, max_size=9))),
        "forbidden_tokens": (UNKNOWN, *draw(st.just([]) | st.lists(ids, max_size=3))),
    }
    kind = draw(st.sampled_from(["greedy", "beam", "draw", "best"]))
    if kind == "beam":
        exponent = draw(st.sampled_from([0.0, 1.0, 0.5]))
        values |= {"beam_size": BEAM, "best": BEAM, "length_exponent": exponent}
        values |= {"most_tokens": min(most, 5), "least_tokens": min(values["least_tokens"], 5)}
    elif kind != "greedy":
        values |= {
            "temperature": draw(st.sampled_from([0.5, 1.0, 2.0])),
            "top_k": 1 if kind == "best" else draw(st.integers(0, 5)),
            "top_p": draw(st.sampled_from([1.0, 0.7])),
            "seed": draw(st.integers(0, 99)),
            "best": draw(st.integers(1, 3)),
        }
    return prompt, DecodingOptions(**{"beam_size": 1} | values)


def check_hypothesis(
    reference: Reference, prompt: list[int], options: DecodingOptions, found: Hypothesis
) -> None:
    """Raises AssertionError if a text could not come of its options, or has other probabilities."""
    tokens = [*found.tokens] if found.end is None else [*found.tokens, found.end]
    assert (found.reason == "end") == (found.end in ENDS)
    assert not set(found.tokens) & set(ENDS) and len(tokens) <= options.most_tokens
    assert found.reason == "end" or len(tokens) == options.most_tokens
    for place, (token, gain) in enumerate(zip(tokens, found.log_probabilities, strict=True)):
        given = (*prompt, *tokens[:place])
        assert abs(reference.after(given)[token] - gain) < CLOSE
        values = reference.choosable(given, options, place)
        assert np.isfinite(values[token])
        better = int((values > values[token] + CLOSE).sum())
        if options.beam_size == 1:
            assert better < (options.top_k or SIZE if options.draws else 1)


def check_search(
    llama: TinyLlama,
    client: TestClient,
    reference: Reference,
    search: tuple[list[int], DecodingOptions],
    neighbors: int,
) -> None:
    """Raises AssertionError if a request is answered wrongly, or in another way among others."""
    prompt, options = search
    engine, request = llama.served.engine, Request(given=prompt, options=options)
    left = reference.allowed(options, 0)
    if not left.any() or not reference.allowed(options, options.most_tokens).any():
        with pytest.raises(ValueError, match="leave no token"):
            engine.submit(request)
        return
    found = engine.submit(request).result()
    for one in found:
        check_hypothesis(reference, prompt, options, one)
    if options.beam_size > 1:
        expected = reference.beam(tuple(prompt), options)
        scores = [one.score for one in found]
        np.testing.assert_allclose(scores, [rank for rank, _ in expected], atol=CLOSE)
    if options.draws and options.top_k == 1:
        greedy = dataclasses.replace(options, temperature=0.0, top_k=0, top_p=1.0, seed=0, best=1)
        (best,) = engine.submit(Request(given=prompt, options=greedy)).result()
        assert {one.tokens for one in found} == {best.tokens}
    others = [
        Request(given=(BOS, *range(4, 5 + i % 9)), options=dataclasses.replace(options, best=1))
        for i in range(neighbors)
    ]
    *_, again = engine.submit_all([*others, request])
    assert_equal(again.result(), found)
    check_generate(client, llama, options, neighbors)


def assert_equal(found: tuple[Hypothesis, ...], others: tuple[Hypothesis, ...]) -> None:
    assert [(h.tokens, h.end, h.reason) for h in found] == [
        (h.tokens, h.end, h.reason) for h in others
    ]
    for one, other in zip(found, others, strict=True):
        np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=CLOSE)


def check_generate(
    client: TestClient, llama: TinyLlama, options: DecodingOptions, number: int
) -> None:
    """Raises AssertionError if /v1/generate streams another text than it answers at once."""
    body = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(options).items()
    }
    body["prompt"] = ("a b", "", "é.", " ab")[number % 4]
    whole = client.post("/v1/generate", json=body)
    assert whole.status_code == 200, whole.text
    expected = [(one["text"], one["reason"]) for one in whole.json()["texts"]]
    if options.beam_size > 1:
        return
    response = client.post("/v1/generate", json=body | {"stream": True})
    *parts, done = response.text.strip().split("\n\n")
    texts = [""] * len(expected)
    for part in parts:
        value = json.loads(part.removeprefix("data: "))
        texts[value["index"]] += value["text"]
    final = json.loads(done.removeprefix("event: done\ndata: "))["texts"]
    assert [(one["text"], one["reason"]) for one in final] == expected
    assert texts == [text for text, _ in expected]


SETTINGS = {"suppress_health_check": list(hypothesis.HealthCheck)}


@pytest.mark.slow
@hypothesis.given(search=searches(), neighbors=st.integers(0, 9))
@hypothesis.settings(max_examples=5, **SETTINGS)
def test_searches_are_those_of_a_plain_model(llama, client, reference, search, neighbors):
    check_search(llama, client, reference, search, neighbors)


@pytest.mark.slow
@hypothesis.given(search=searches(), neighbors=st.integers(0, 9))
@hypothesis.settings(max_examples=1000, **SETTINGS)
def test_many_searches_are_those_of_a_plain_model(llama, client, reference, search, neighbors):
    check_search(llama, client, reference, search, neighbors)
