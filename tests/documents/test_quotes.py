# tests: /docs/quoted/
"""Tests that figures of plans on the pages are those of today's plans."""

import msgspec
import pytest

from docs.quoted import quotes

ALL = list(quotes.load())


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


@pytest.mark.slow
@pytest.mark.parametrize("quote", ALL, ids=lambda quote: quote.page)
def test_pages_quote_what_is_planned_today(quote):
    if quote.missing:
        pytest.skip(f"the compiler of {', '.join(quote.missing)} is not installed")
    now = quote.now()
    assert quote.is_on_page(now), now
