# tests: wings/serving/page/
"""Talks to a chat model on the server's page, in a real browser."""

import pytest

import lingvo_gshard as gshard
from lingvo_gshard.wings.serving.model import ServedModel
from lingvo_gshard.wings.serving.service import Service
from tests.fine_tuning.conversations import chat_models
from tests.pages import audit
from tests.serving.conftest import PATIENT
from tests.serving.test_page import answer, needs_browser, serve, until, window

__all__ = ["serve", "window"]

pytestmark = [pytest.mark.xdist_group("serving"), needs_browser]

CARD = """---
license: apache-2.0
widget:
- messages: [{role: system, content: w9}, {role: user, content: w6 w7}]
- text: w11
---
# A model
"""
# Sends answers of the test in place of the server's, and keeps what was asked.
UNDER_CONTROL = """
window.asked = [];
window.fetch = async (path, options) => {
  window.asked.push(JSON.parse(options.body));
  const stream = new ReadableStream({ start: (control) => { window.control = control; } });
  options.signal.addEventListener("abort", () => window.control.error(options.signal.reason));
  return new Response(stream);
};
window.send = (data) => window.control.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
window.write = (content, reason) => window.send(JSON.stringify(
  { choices: [{ index: 0, delta: content ? { content } : {}, finish_reason: reason || null }] }));
"""


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """Returns a served model with a chat template, and a card with messages to try."""
    folder = tmp_path_factory.mktemp("chatting")
    # Answers that are drawn have no end in sight: a conversation must have room for long ones.
    chat_models.write(folder / "model", max_position_embeddings=512)
    (folder / "model" / "README.md").write_text(CARD, encoding="utf-8")
    gshard.import_model(folder / "model", folder / "run", length=512)
    return ServedModel.of_run(gshard.load(folder / "run"))


def opened(window, address):
    """Opens the page of a chat model."""
    window.open(address)
    until(window, "return document.querySelectorAll('.example').length > 0")


def words(window, *states):
    """Returns the turns on the page, each as who and what, once the page says one of the states."""
    until(
        window,
        f"return {list(states)}.includes(document.querySelector('#state').textContent)",
    )
    heads, texts = window.texts(".turn h2"), window.texts(".turn .words")
    return list(zip(heads, texts, strict=True))


def test_a_conversation_goes_on_from_an_example_of_the_model(serve, window, chatting):
    opened(window, serve(Service(chatting, PATIENT)))
    assert window.texts(".example") == ["w6 w7", "w11"]
    assert window.texts("#go") == ["Send"] and window.texts("#count") == []
    window.run(
        "const real = fetch; window.asked = [];"
        "window.fetch = (path, options) => {"
        "  asked.push(options.body); return real(path, options); }"
    )
    window.click(".example")
    complete = "The answer is complete."
    (_, first), (name, answer) = words(window, complete)
    assert first == "w6 w7" and name == chatting.name
    window.run("document.querySelector('#state').textContent = ''")
    window.type("#text", "w11\ue007")
    found = words(window, complete)
    assert [who for who, _ in found] == ["You", chatting.name] * 2
    assert found[:2] == [("You", "w6 w7"), (chatting.name, answer)]
    second = window.run("return JSON.parse(asked[1])")
    said = "" if answer == "(nothing)" else answer
    assert second["stream"] is True and second["messages"] == [
        {"role": "user", "content": "w6 w7"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "w11"},
    ]
    window.click("#anew")
    assert words(window, "A new conversation has begun.") == []
    assert window.texts(".example") == ["w6 w7", "w11"]
    assert window.console() == []


@pytest.fixture
def controlled(serve, window, chatting):
    """Returns the window with the page, whose answers the test sends."""
    opened(window, serve(Service(chatting, PATIENT)))
    window.run(UNDER_CONTROL)
    window.type("#text", "Hi\ue007")
    until(window, "return !!window.control")
    return window


def grown(window, text):
    until(
        window,
        f"return document.querySelector('.turn:last-of-type .words').textContent === {text!r}",
    )


def test_an_answer_grows_until_it_is_stopped(controlled, chatting):
    window = controlled
    controlled.run("write('Go')")
    grown(window, "Go")
    controlled.run("write('od <b>day</b>')")
    grown(window, "Good <b>day</b>")
    assert window.texts("#go") == ["Stop"] and window.texts(".turn b") == []
    assert window.run("return document.querySelector('#turns').ariaBusy") == "true"
    # Enter sends nothing while the model writes; the next message can be typed.
    window.type("#text", "And\ue007")
    assert window.run("return asked.length") == 1
    window.click("#go")
    assert words(window, "Stopped.") == [("You", "Hi"), (chatting.name, "Good <b>day</b>")]
    assert window.texts(".turn:last-of-type .muted") == ["Stopped"]
    assert window.run("return document.querySelector('#turns').ariaBusy") == "false"
    window.click("#go")
    assert window.run("return asked[1].messages.map((each) => each.content)") == [
        "Hi", "Good <b>day</b>", "And",
    ]  # fmt: skip
    # Escape stops, too. Nothing was answered, so that the message can be changed.
    window.type("#text", "\ue00c")
    assert len(words(window, "Stopped.")) == 2
    assert window.run("return document.querySelector('#text').value") == "And"


def test_answers_end_for_a_reason_that_is_shown(controlled, chatting):
    window = controlled
    window.run("write('Long'); write('', 'length'); send('[DONE]')")
    assert words(window, "The answer is complete.")[1] == (chatting.name, "Long")
    assert window.texts(".turn:last-of-type .muted")[0].startswith("Cut off")
    window.type("#text", "More\ue007")
    until(window, "return asked.length === 2")
    window.run("write('Ye'); control.close()")
    assert len(words(window, "")) == 4
    assert window.texts(".turn:last-of-type .muted") == ["Incomplete"]
    assert window.texts("#problem") == ["The connection ended before the answer was complete."]


def test_a_refused_message_comes_back(controlled):
    window = controlled
    window.run("send(JSON.stringify({ error: { message: 'too long' } }))")
    until(window, "return !document.querySelector('#problem').hidden")
    assert window.texts("#problem") == ["too long"] and window.texts(".turn") == []
    assert window.run("return document.querySelector('#text').value") == "Hi"
    assert len(window.texts(".example")) == 2


def test_a_new_conversation_forgets_an_answer_that_is_being_written(controlled):
    window = controlled
    window.run("write('Old')")
    grown(window, "Old")
    window.click("#anew")
    assert words(window, "A new conversation has begun.") == []
    window.type("#text", "New\ue007")
    assert window.run("return asked[1].messages") == [{"role": "user", "content": "New"}]
    window.run("write('Yes', 'stop'); send('[DONE]')")
    assert [text for _, text in words(window, "The answer is complete.")] == ["New", "Yes"]


def test_the_page_works_by_keyboard_and_names_its_parts(controlled):
    window = controlled
    window.run("write('Yes', 'stop'); send('[DONE]')")
    words(window, "The answer is complete.")
    focused = "return document.activeElement.id"
    assert window.run(focused) == "text"
    assert window.run("return document.querySelector('#text').labels[0].textContent") == "Message"
    roles = "return ['#turns', '#state', '#problem'].map((e) => document.querySelector(e).role)"
    assert window.run(roles) == ["log", "status", "alert"]
    names = "return [...document.querySelectorAll('#turns, .turn')].map((e) => e.ariaLabel)"
    assert window.run(names)[:2] == ["Conversation", "You"]
    order = []
    for _ in range(2):
        window.type("#" + (order[-1] if order else "text"), "\ue004")
        order.append(window.run(focused))
    assert order == ["anew", "go"]


def test_a_chat_model_continues_texts_on_a_page_of_its_own(serve, window, chatting):
    opened(window, serve(Service(chatting, PATIENT)))
    window.click("#facts a")
    until(
        window, "return !!document.querySelector('#count') && !!document.querySelector('#facts a')"
    )
    assert window.texts("#go") == ["Continue"] and window.texts("#turns") == []
    answer(window, "w6 w7")
    assert len(window.texts("#alternatives .text")) == 4
    window.click("#facts a")
    until(window, "return !!document.querySelector('#turns')")
    assert window.console() == []


@pytest.mark.slow
def test_a_conversation_is_readable_on_phones_and_desks_in_light_and_dark(serve, chatting):
    address = serve(Service(chatting, PATIENT))
    shown = []

    def talk(window):
        opened(window, address)
        shown.extend(audit.problems(window, window.run("return innerWidth")))
        window.run(UNDER_CONTROL)
        window.type("#text", f"{'A long question, ' * 9}{'x' * 90}\ue007")
        until(window, "return !!window.control")
        window.run("write('First line\\n' + 'An answer, '.repeat(20) + 'y'.repeat(90))")
        window.run("write('', 'length'); send('[DONE]')")
        words(window, "The answer is complete.")
        # The form stays in view.
        box = window.run("return document.querySelector('#go').getBoundingClientRect().bottom")
        assert box <= window.run("return innerHeight")

    assert audit.problems_on_screens(talk) == []
    assert shown == []
