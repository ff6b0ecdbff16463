# tests: wings/inference/programs/executables.py, wings/inference/engine/engine.py
"""Tests that texts are decoded while programs for others are compiled."""

import queue
import time

import pytest

from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.programs import executables
from lingvo_gshard.wings.inference.programs.executables import ProgramKey
from lingvo_gshard.wings.inference.requests import Request
from tests.inference import tiny_engine
from tests.inference.gate import gate
from tests.inference.tiny_engine import BOS, EOS

GREEDY = DecodingOptions(beam_size=1, most_tokens=6)
BEAM = DecodingOptions(beam_size=3, most_tokens=6)
LONG = DecodingOptions(beam_size=1, most_tokens=60, least_tokens=60)
SOURCE = (5, 6, 2)


@pytest.fixture(scope="module")
def model():
    return tiny_engine.translation_model()


@pytest.fixture(scope="module")
def engine(model):
    """Returns an engine with one worker that has the programs for short greedy texts."""
    with model.engine(workers=1) as made:
        ask(made, GREEDY).result()
        yield made


def ask(engine, options):
    return engine.submit(Request(SOURCE, (BOS,), options))


def is_beam(key: ProgramKey) -> bool:
    return key.kind is not None and key.kind.beam == 3


def is_long(key: ProgramKey) -> bool:
    return key.shape is not None and key.shape.length > 32


def events_of(answer):
    """Returns a queue of what an answer gets; reading from it fails after a while."""
    found = queue.Queue()
    answer.listen(found.put)
    return found


def test_common_requests_are_answered_while_a_rare_kind_is_compiled(model, engine):
    with gate(engine.executables, is_beam) as held:
        rare = ask(engine, BEAM)
        assert held.asked.wait(60)
        for _ in range(5):
            (found,) = ask(engine, GREEDY).result()
            tokens, _ = tiny_engine.plain_greedy(model, SOURCE, [BOS], 6)
            assert list(found.tokens) == [token for token in tokens if token != EOS]
        held.open()
        (found,) = rare.result()
    ended = tiny_engine.plain_beam(model, SOURCE, [BOS], 6, 3)
    _, tokens, _ = tiny_engine.ranked(ended, BEAM.length_exponent)[0]
    assert list(found.tokens) == [token for token in tokens if token != EOS]


@pytest.mark.slow
def test_texts_of_a_lane_go_on_when_one_needs_a_larger_shape(model, engine):
    with gate(engine.executables, is_long) as held:
        long = ask(engine, LONG)
        assert held.asked.wait(60)
        for _ in range(5):
            ask(engine, GREEDY).result()
        held.open()
        (found,) = long.result()
    not_end = [token != EOS for token in range(tiny_engine.V)]
    tokens, _ = tiny_engine.plain_greedy(model, SOURCE, [BOS], 59, allowed=not_end)
    assert found.tokens[:59] == tuple(tokens) and len(found.log_probabilities) == 60


def test_a_text_that_waits_for_a_program_leaves_when_it_is_canceled(engine):
    with gate(engine.executables, is_beam) as held:
        rare = ask(engine, BEAM)
        assert held.asked.wait(60)
        events = events_of(rare)
        rare.cancel()
        assert events.get(timeout=60).hypotheses == () and engine.waiting == 0


def test_a_text_that_has_outgrown_its_lane_leaves_when_it_is_canceled(engine):
    with gate(engine.executables, is_long) as held:
        long = ask(engine, LONG)
        assert held.asked.wait(60)
        events = events_of(long)
        long.cancel()
        (found,) = events.get(timeout=60).hypotheses
        assert 0 < len(found.tokens) < 60 and found.reason == "canceled"


def test_an_error_of_the_compiler_reaches_those_who_wait_and_is_tried_again(engine, monkeypatch):
    with gate(engine.executables, is_beam, ValueError("no such beam")) as held:
        held.open()
        answers = [ask(engine, BEAM) for _ in range(3)]
        ask(engine, GREEDY).result()
        for answer in answers:
            with pytest.raises(ValueError, match="no such beam"):
                answer.result()
    monkeypatch.setattr(executables, "_RETRY_SECONDS", 0.0)
    assert ask(engine, BEAM).result()


def test_what_takes_too_long_is_told(engine):
    assert engine.stuck(600.0) == engine.stuck_programs(600.0) == []
    with gate(engine.executables, is_beam) as held:
        rare = ask(engine, BEAM)
        assert held.asked.wait(60)
        assert engine.stuck_programs(600.0) == []
        (said,) = (line for line in engine.stuck_programs(0.0) if "-beam3-" in line)
        assert " has been compiled for " in said
        rare.cancel()
    ask(engine, GREEDY).result()
    while engine._workers[0].busy_since:
        time.sleep(0.001)
    engine._workers[0].busy_since = time.monotonic() - 700
    assert engine.stuck(600.0) == ["worker 1 has decoded for 700 s"]
    engine._workers[0].busy_since = None


def test_a_forgotten_kind_takes_no_memory_and_is_compiled_again(engine):
    with gate(engine.executables, is_beam) as held:
        held.open()
        before = engine.executables.count
        first = ask(engine, BEAM).result()
        assert engine.executables.count > before and engine.executables.knows(BEAM.kind)
        assert not engine.executables.knows(DecodingOptions(beam_size=5).kind)
        engine.executables.forget(BEAM.kind)
        assert engine.executables.count == before and not engine.executables.knows(BEAM.kind)
        ask(engine, GREEDY).result()
        assert BEAM.kind not in engine._workers[0]._batches
        assert ask(engine, BEAM).result() == first


def test_programs_that_nobody_wants_any_more_are_not_made(monkeypatch):
    made = []
    makers = executables.Background(made.append, 1, "test")
    monkeypatch.setattr(executables, "_FORGET_SECONDS", -1.0)
    makers.want(ProgramKey("old"), lambda: None)
    while makers._wanted:
        time.sleep(0.001)
    monkeypatch.setattr(executables, "_FORGET_SECONDS", 60.0)
    makers.want(ProgramKey("new"), lambda: None)
    while not made:
        time.sleep(0.001)
    makers.stop()
    assert made == [ProgramKey("new")]
