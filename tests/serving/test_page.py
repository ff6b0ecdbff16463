# tests: wings/serving/page/
"""Uses the page for people in a real browser."""

import dataclasses
import re
import threading
import time

import pytest

from lingvo_gshard.wings.serving import page
from lingvo_gshard.wings.serving.server import Server, ServerOptions, bind
from lingvo_gshard.wings.serving.service import Service
from tests.data import corpora
from tests.pages import audit, browser
from tests.serving.conftest import PATIENT

needs_browser = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
pytestmark = pytest.mark.xdist_group("serving")

SENTENCE = corpora.rows(1)[0].source


@pytest.fixture
def serve():
    """Returns a function that serves on a thread and returns the address of the page."""
    started = []

    def start(service):
        bound = bind("127.0.0.1", 0)
        server = Server(service, ServerOptions(drain_seconds=5.0), lambda text: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        started.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return f"http://127.0.0.1:{bound.getsockname()[1]}/"

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def window():
    with browser.Browser(width=500) as opened:
        yield opened


def answer(opened, text):
    """Types a text, sends it, and waits for an answer or a problem."""
    opened.type("#text", text)
    opened.click("#go")
    until(opened, "return !document.querySelector('#go').disabled && "
          "!!document.querySelector('#best, #problem:not([hidden])')")  # fmt: skip


def until(opened, condition):
    # The first request compiles.
    limit = time.monotonic() + PATIENT.timeout
    while time.monotonic() < limit:
        if opened.run(condition):
            return
        time.sleep(0.05)
    raise AssertionError(opened.run("return document.body.innerText"))


@needs_browser
def test_a_sentence_shows_translations_probabilities_and_experts(serve, window, translating):
    window.open(serve(Service(translating, PATIENT)))
    until(window, "return document.querySelectorAll('.example').length > 0")
    # Names of languages, and no codes.
    assert re.match(r"Translates(\.| from [A-Z][a-z]{3,})", window.texts("#facts")[0])
    answer(window, SENTENCE)
    assert window.texts(".example") == []
    alternatives = window.texts("#alternatives .text")
    assert len(alternatives) == 4 and window.texts("#best")[0] == alternatives[0]
    assert all(re.fullmatch(r"\u2212?\d+\.\d\d", score) for score in window.texts(".score"))
    # One alternative may be empty, and then visits no expert of the decoder.
    number = 1 + next(n for n, text in enumerate(alternatives) if text != "(nothing)")
    window.click(f"#alternatives li:nth-child({number}) button")
    tokens = window.texts(".token .piece")
    assert len(window.texts(".token .probability")) == len(tokens) > 0
    assert window.texts("figcaption") == [
        "Encoder, expert layer 1encoder.layers[0].feed_forward",
        "Decoder, expert layer 1decoder.layers[0].feed_forward",
    ]
    source = translating.translator.encode([SENTENCE])[0]
    heads = "figure:first-of-type thead th"
    assert len(window.texts(heads)) == 1 + len(source) + 1
    # Every token visits one or two experts.
    columns = "return [...document.querySelectorAll('figure:first-of-type tbody tr')].map("
    columns += "(row) => [...row.querySelectorAll('td')].map((cell) => cell.childElementCount))"
    visits = [sum(column) for column in zip(*window.run(columns), strict=True)]
    assert len(visits) == len(source) + 1 and set(visits) <= {1, 2}
    pressed = window.texts(".alternative[aria-pressed=true] .text")
    assert pressed == alternatives[number - 1 : number]
    # A click on a token marks its experts.
    window.click(".token")
    lit = "return document.querySelectorAll('.lit').length"
    assert window.run(lit) > 0
    window.click(".token")
    assert window.run(lit) == 0
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    assert window.console() == []


@needs_browser
def test_the_page_of_a_language_model_continues_a_text(serve, window, writing):
    window.open(serve(Service(writing, PATIENT)))
    answer(window, "the")
    assert window.texts("#go") == ["Continue"]
    alternatives = window.texts("#alternatives .text")
    assert len(alternatives) == 4
    # A text that is drawn may be empty, and then visits no expert.
    number = 1 + next(n for n, text in enumerate(alternatives) if text != "(nothing)")
    window.click(f"#alternatives li:nth-child({number}) button")
    assert window.texts("figcaption") == ["Decoder, expert layer 1decoder.layers[0].feed_forward"]
    assert window.console() == []


@needs_browser
def test_mistakes_and_markup_are_shown_as_text(serve, window, translating):
    model = dataclasses.replace(translating, name="<img src=x onerror=alert(1)>")
    window.open(serve(Service(model)))
    until(window, "return document.title !== 'lingvo_gshard'")
    assert window.texts("#name") == [model.name]
    answer(window, "b " * 999)
    (problem,) = window.texts("#problem")
    assert problem.startswith("text has ") and "Split it into sentences" in problem
    assert window.run("return document.querySelectorAll('img').length") == 0
    # The browser reports the status 422.
    assert all("422" in line for line in window.console())


@needs_browser
def test_the_page_asks_for_a_token(serve, window, translating):
    window.open(serve(Service(translating, token="secret")))
    until(window, "return !document.querySelector('#unlock').hidden")
    window.type("#token", "secret")
    window.click("#unlock button")
    until(window, "return document.querySelector('#unlock').hidden")
    assert window.texts("#name") == [translating.name]
    window.run("sessionStorage.clear()")
    window.console()


def test_the_page_loads_nothing_and_never_reads_text_as_markup():
    text, policy = page.to_html()
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|@import|url\(", text)


@needs_browser
@pytest.mark.slow
def test_the_page_is_readable_on_phones_and_desks_in_light_and_dark(serve, translating):
    address = serve(Service(translating, PATIENT))
    shown = []

    def translate(opened):
        opened.open(address)
        until(opened, "return document.querySelectorAll('.example').length > 0")
        shown.extend(audit.problems(opened, opened.run("return innerWidth")))
        answer(opened, SENTENCE)

    assert audit.problems_on_screens(translate) == []
    assert shown == []
