# tests: wings/inference/decoding/beam.py, wings/inference/decoding/greedy.py
# tests: wings/inference/decoding/steps.py, wings/inference/requests.py
"""Compares an engine's translations with plain searches that run the full model for each token."""

import dataclasses

import numpy as np
import pytest

from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Finished, NewTokens, Request
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS, EOS

SOURCES = [[5, 6, 7, 8, 2], [9, 2], [4, 11, 4, 2], [12, 2], [*range(3, 13), *range(3, 13), 2]]
GREEDY = DecodingOptions(beam_size=1, most_tokens=9)
BEAM = DecodingOptions(beam_size=3, best=3, most_tokens=12)


@pytest.fixture(scope="module")
def model():
    return tiny_engine.translation_model()


@pytest.fixture(scope="module")
def engine(model):
    with model.engine(workers=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def ended(model):
    """Returns the hypotheses of a plain beam search for each of SOURCES."""
    return [tiny_engine.plain_beam(model, source, [BOS], 12, BEAM.beam_size) for source in SOURCES]


def answers(engine, options, sources=SOURCES, **fields):
    requests = [Request(source, (BOS,), options, **fields) for source in sources]
    return [answer.result() for answer in engine.submit_all(requests)]


def check(hypothesis, tokens, gains, score):
    expected = tuple(tokens[:-1] if tokens[-1] == EOS else tokens)
    assert hypothesis.tokens == expected
    np.testing.assert_allclose(hypothesis.log_probabilities, gains, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hypothesis.score, score, rtol=1e-4, atol=1e-5)
    assert hypothesis.reason == ("end" if tokens[-1] == EOS else "length")


def test_greedy_decoding_equals_full_passes(model, engine):
    texts = set()
    for source, (found,) in zip(SOURCES, answers(engine, GREEDY), strict=True):
        tokens, gains = tiny_engine.plain_greedy(model, source, [BOS], 9)
        check(found, tokens, gains, sum(gains))
        texts.add(found.tokens)
    assert len(texts) > 2


@pytest.mark.parametrize("exponent", [1.0, 0.0, -0.5])
def test_beam_search_equals_a_plain_search(engine, ended, exponent):
    options = dataclasses.replace(BEAM, length_exponent=exponent)
    for found, hypotheses in zip(answers(engine, options), ended, strict=True):
        best = tiny_engine.ranked(hypotheses, exponent)[:3]
        for hypothesis, (rank, tokens, gains) in zip(found, best, strict=True):
            check(hypothesis, tokens, gains, rank)


def test_stopping_early_changes_nothing_but_the_steps(model, engine):
    """With one wanted hypothesis the search stops sooner, and finds the same best one."""
    alone = answers(engine, dataclasses.replace(BEAM, best=1))
    assert [found[0] for found in alone] == [found[0] for found in answers(engine, BEAM)]


def test_answers_do_not_depend_on_neighbors(engine):
    for options in (GREEDY, BEAM):
        together = answers(engine, options)
        for source, found in zip(SOURCES, together, strict=True):
            (alone,) = answers(engine, options, [source])
            assert [h.tokens for h in alone] == [h.tokens for h in found]
            np.testing.assert_allclose(alone[0].score, found[0].score, rtol=1e-5)


def test_more_texts_than_rows_take_each_others_places(engine):
    sources = [SOURCES[i % 5] for i in range(40)]
    few = answers(engine, GREEDY)
    many = answers(engine, GREEDY, sources)
    assert [found[0].tokens for found in many] == [few[i % 5][0].tokens for i in range(40)]


@pytest.mark.slow
def test_a_prefix_is_computed_at_once_and_continued(model, engine):
    prefix = [BOS, 7, 8, 9]
    for options in (GREEDY, dataclasses.replace(BEAM, best=1)):
        answer = engine.submit(Request(SOURCES[0], prefix, options))
        (found,) = answer.result()
        if options is GREEDY:
            tokens, gains = tiny_engine.plain_greedy(model, SOURCES[0], prefix, 9)
            check(found, tokens, gains, sum(gains))
        else:
            hypotheses = tiny_engine.plain_beam(model, SOURCES[0], prefix, 12, options.beam_size)
            rank, tokens, gains = tiny_engine.ranked(hypotheses, options.length_exponent)[0]
            check(found, tokens, gains, rank)


@pytest.mark.slow
def test_long_texts_outgrow_the_first_cache(model, engine):
    """60 tokens after a source of 2: more than the positions that the batch begins with."""
    options = DecodingOptions(beam_size=1, most_tokens=60, least_tokens=60)
    (found,) = answers(engine, options, [SOURCES[1]])[0]
    not_end = np.arange(tiny_engine.V) != EOS
    tokens, _ = tiny_engine.plain_greedy(model, SOURCES[1], [BOS], 59, allowed=not_end)
    assert found.tokens[:59] == tuple(tokens) and len(found.log_probabilities) == 60


@pytest.mark.slow
def test_tokens_are_restricted(model, engine):
    allowed = np.isin(np.arange(tiny_engine.V), [4, 5, 6, EOS])
    only = dataclasses.replace(GREEDY, allowed_tokens=(4, 5, 6))
    without = tuple(i for i in range(tiny_engine.V) if not allowed[i])
    barred = dataclasses.replace(GREEDY, forbidden_tokens=without)
    tokens, gains = tiny_engine.plain_greedy(model, SOURCES[0], [BOS], 9, allowed)
    for options in (only, barred):
        (found,) = answers(engine, options, SOURCES[:1])[0]
        check(found, tokens, gains, sum(gains))


@pytest.mark.slow
def test_a_beam_has_no_more_hypotheses_than_there_are_texts(model, engine):
    """Of token 4 alone there are two texts of 6 tokens: with an end, and without."""
    options = dataclasses.replace(
        BEAM, beam_size=5, best=5, allowed_tokens=(4,), least_tokens=6, most_tokens=6
    )
    gains = []
    for length in range(6):
        (row,) = model.log_probabilities(SOURCES[0], [[BOS, *[4] * length]])
        gains.append((row[4], row[EOS]))
    going_on = [gain for gain, _ in gains]
    texts = [((4,) * 6, going_on, "length"), ((4,) * 5, [*going_on[:5], gains[5][1]], "end")]
    # The penalty of 6 tokens is more than 1,000: it makes any score look possible.
    for exponent in (1.0, 12.0):
        asked = dataclasses.replace(options, length_exponent=exponent)
        found = {h.tokens: h for h in answers(engine, asked, SOURCES[:1])[0]}
        assert len(found) == 2
        for tokens, gained, reason in texts:
            assert found[tokens].reason == reason
            np.testing.assert_allclose(found[tokens].log_probabilities, gained, rtol=1e-4)
            score = sum(gained) / (11 / 6) ** exponent
            np.testing.assert_allclose(found[tokens].score, score, rtol=1e-4)


def test_a_search_ends_when_no_text_can_go_on(engine):
    """The end alone is allowed, so that two of the three wanted hypotheses never come."""
    everything = tuple(i for i in range(tiny_engine.V) if i != EOS)
    options = dataclasses.replace(BEAM, forbidden_tokens=everything, most_tokens=64)
    (found,) = answers(engine, options, SOURCES[:1])
    assert [h.tokens for h in found] == [()]


def test_tokens_are_streamed_as_they_come(engine):
    events = list(engine.submit(Request(SOURCES[0], (BOS,), GREEDY, streams=True)))
    *parts, last = events
    assert isinstance(last, Finished) and len(parts) > 1
    assert all(isinstance(part, NewTokens) for part in parts)
    tokens = [token for part in parts for token in part.tokens]
    assert tuple(token for token in tokens if token != EOS) == last.hypotheses[0].tokens


def test_a_text_stops_where_the_caller_says(engine):
    stop = dataclasses.replace(GREEDY, most_tokens=40, least_tokens=40)
    request = Request(SOURCES[0], (BOS,), stop, should_stop=lambda tokens: len(tokens) >= 4)
    (found,) = engine.submit(request).result()
    assert found.reason == "stop" and len(found.tokens) == len(found.log_probabilities) == 4


@pytest.mark.parametrize(
    ("source", "given", "options", "words"),
    [
        ([], [BOS], GREEDY, "takes a source, and the request has 0 tokens"),
        ([5] * 300, [BOS], GREEDY, "the source has 300 tokens; the model takes 256"),
        ([5, 2], [], GREEDY, "gives 0 tokens; 1 to 1024"),
        ([5, 2], [5] * 1025, GREEDY, "gives 1025 tokens; 1 to 1024"),
        ([5, 2], [BOS], DecodingOptions(beam_size=13), "beam_size is 13; 1 to 12 was expected"),
        (
            [5, 2],
            [BOS],
            DecodingOptions(allowed_tokens=(EOS, 4), forbidden_tokens=(4,), least_tokens=2),
            "leave no token besides the end, and least_tokens is 2",
        ),
    ],
)
def test_requests_that_do_not_fit_are_refused(engine, source, given, options, words):
    with pytest.raises(ValueError, match=words):
        engine.submit(Request(source, given, options))


def test_a_closed_engine_takes_no_requests(model):
    engine = model.engine()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.submit(Request(SOURCES[0], (BOS,), GREEDY))
