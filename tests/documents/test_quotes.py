# tests: /docs/quoted/
"""Tests that figures of plans on the pages are those of today's plans."""

import pathlib
import re
import shlex

import msgspec
import pytest

from docs.quoted import quotes

ALL = list(quotes.load())
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def test_every_passage_stands_on_its_page_with_some_figures():
    assert [quote.text for quote in ALL if not quote.stands_on_page] == []


def test_a_passage_with_other_words_is_missed():
    quote = next(quote for quote in ALL if quote.page == "strategies.md")
    assert quote.stands_on_page
    other = msgspec.structs.replace(quote, text=quote.text.replace("two layers", "three layers"))
    assert not other.stands_on_page


def test_a_passage_with_other_figures_is_not_on_the_page():
    quote = next(quote for quote in ALL if quote.page == "strategies.md")
    text = "two layers of Mixtral 8x7B take 90 ms with `expert_tensor`, 54 with `folded_tensor`."
    assert quote.is_on_page(text)
    assert not quote.is_on_page(text.replace("54", "55"))


@pytest.mark.parametrize(
    "page,beginning,plan",
    [
        ("planning.md", "By this plan a step takes", "plan"),
        ("memory_and_communication.md", "The default options lower", "v5p_none"),
        ("memory_and_communication.md", "| both |", "v5p"),
    ],
)
def test_a_command_that_a_page_shows_is_the_one_behind_its_figures(page, beginning, plan):
    (quote,) = (q for q in ALL if q.page == page and q.text.strip().startswith(beginning))
    text = (DOCS / page).read_text(encoding="utf-8").replace("\\\n", " ")
    shown = [set(shlex.split(line)) for line in re.findall(r"^gshard-plan (.*)$", text, re.M)]
    assert set(shlex.split(quote.plans[plan])) in shown


@pytest.mark.slow
@pytest.mark.parametrize("quote", ALL, ids=lambda quote: quote.page)
def test_pages_quote_what_is_planned_today(quote):
    if quote.missing:
        pytest.skip(f"the compiler of {', '.join(quote.missing)} is not installed")
    now = quote.now()
    assert quote.is_on_page(now), now
