# tests: wings/inference/engine/waiting.py, wings/inference/engine/engine.py
# tests: wings/inference/requests.py
"""Tests whose turn it is, and that canceled texts do not wait."""

import pytest

from lingvo_gshard.wings.inference.engine.waiting import DecodedText, WaitingTexts
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Answer, Finished, Request
from tests.inference import tiny_engine
from tests.inference.tiny_engine import BOS

GREEDY = DecodingOptions(beam_size=1, most_tokens=6)


@pytest.fixture
def waiting():
    return WaitingTexts()


def rows(waiting, client, group, count):
    """Adds texts that wait, named after their client, group and number (their limit)."""
    request = Request(client=client, group=group, options=GREEDY)
    made = [DecodedText(Answer(request, 1, waiting.cancel), 0, n, ()) for n in range(count)]
    waiting.put(made)
    return made


def name(row):
    return f"{row.answer.request.client}{row.answer.request.group}.{row.limit}"


def take(waiting, most):
    taken = waiting.take(GREEDY.kind, lambda rows, _: rows[:most])
    return " ".join(map(name, taken))


def test_clients_take_turns_and_so_do_their_groups(waiting):
    rows(waiting, "a", 1, 4)
    rows(waiting, "b", 2, 2)
    rows(waiting, "a", 3, 2)
    assert take(waiting, 3) == "a1.0 b2.0 a3.0"
    assert take(waiting, 1) == "b2.1"
    assert take(waiting, 2) == "a1.1 a3.1"
    assert take(waiting, 9) == "a1.2 a1.3"
    assert waiting.total == 0 and waiting.share(GREEDY.kind) == 8


def test_one_text_waits_for_one_of_a_thousand(waiting):
    rows(waiting, "a", 1, 1000)
    assert take(waiting, 8) == " ".join(f"a1.{n}" for n in range(8))
    rows(waiting, "a", 2, 1)
    rows(waiting, "b", 3, 1)
    assert take(waiting, 3) == "a1.8 b3.0 a2.0"


def test_texts_of_one_group_keep_their_order(waiting):
    rows(waiting, "", 0, 5)
    rows(waiting, "", 0, 5)
    assert take(waiting, 3) == ".0 .1 .2".replace(".", "0.")
    assert take(waiting, 9) == "0.3 0.4 0.0 0.1 0.2 0.3 0.4"


def test_canceled_texts_leave_at_once(waiting):
    canceled = rows(waiting, "a", 1, 3)
    rows(waiting, "a", 2, 1)
    for row in canceled[:2]:
        events = []
        row.answer.listen(events.append)
        row.answer.cancel()
        assert events == [Finished(())]
    assert waiting.total == 2
    assert take(waiting, 9) == "a1.2 a2.0"
    canceled[2].answer.cancel()
    assert waiting.total == 0


@pytest.fixture(scope="module")
def engine():
    """Returns an engine that decodes eight texts at a time, on one thread."""
    with tiny_engine.translation_model().engine(workers=1, rows=8) as made:
        yield made


def texts(count, client):
    return [Request((4 + n % 5, 2), (BOS,), GREEDY, client=client) for n in range(count)]


def test_a_client_does_not_wait_behind_the_texts_of_another(engine):
    """The one text ends with the first of two hundred, which fill the batch eight at a time."""
    answers = engine.submit_all(texts(200, "a"))
    alone = engine.submit(Request((5, 6, 2), (BOS,), GREEDY, client="b", group=1))
    assert alone.result()
    done = sum(not answer._events.empty() for answer in answers)
    for answer in answers[::2]:
        answer.cancel()
    for answer in answers[1::2]:
        assert answer.result()
    assert done <= 40


def test_abandoned_texts_are_not_decoded(engine):
    answers = engine.submit_all(texts(400, "a"))
    for answer in answers:
        answer.cancel()
    assert engine.waiting == 0
    assert sum(bool(answer.result()) for answer in answers) <= 48
