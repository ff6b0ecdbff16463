"""Looks for what a reader of a page would stumble over: side scrolling, cut text, faint text."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from tests.pages.browser import Browser

# Width, height, and whether it is a phone.
SCREENS = ((390, 844, True), (1280, 900, False))
# Web Content Accessibility Guidelines 2.2, success criterion 1.4.3, level AA.
LEAST_CONTRAST, LEAST_OF_LARGE = 4.5, 3.0

_SCRIPT = pathlib.Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


def problems(opened: Browser, width: int) -> list[str]:
    """Returns what is wrong with the open page in a window of a width, as sentences."""
    return opened.run(_SCRIPT, width, LEAST_CONTRAST, LEAST_OF_LARGE)


def problems_on_screens(visit: Callable[[Browser], None]) -> list[str]:
    """Returns what is wrong on a phone and on a desk, in light and in dark.

    Args:
      visit: opens the page in a browser and brings it into the state to look at.
    """
    found = []
    for width, height, is_phone in SCREENS:
        for is_dark in (False, True):
            with Browser(width, height, is_dark, is_phone) as opened:
                visit(opened)
                scheme = "dark" if is_dark else "light"
                found += [f"{width}, {scheme}: {each}" for each in problems(opened, width)]
    return found
