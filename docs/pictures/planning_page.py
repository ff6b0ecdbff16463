"""Takes screenshots of the page of gshard-plan --serve, on light and on dark pages."""

from __future__ import annotations

import pathlib
import time

from tests.pages.browser import Browser

WIDTH, HEIGHT = 1180, 1600
MACHINES = ("v5p:2x2x2", "v6e:4x4")
# Values of the form's fields.
_FIELDS = {
    "model": "config:llama-3.1-8b",
    "strategy": "fsdp",
    "batch": "64",
    "length": "2048",
    "precision": "bfloat16",
}
_SECONDS = 3600.0


def take(url: str, folder: pathlib.Path) -> None:
    """Writes planning_page.png and planning_page_dark.png: Llama 3.1 8B on two machines.

    Args:
      url: address of the page.
      folder: where to write.

    Raises:
      TimeoutError: a plan is not made in time.
    """
    for name, is_dark in (("planning_page.png", False), ("planning_page_dark.png", True)):
        with Browser(WIDTH, HEIGHT, is_dark) as browser:
            browser.open(url)
            _wait(browser, "document.querySelectorAll('#model option').length > 2")
            for field, value in _FIELDS.items():
                browser.run(f"document.getElementById({field!r}).value = {value!r}")
            for number, machine in enumerate(MACHINES, start=1):
                browser.run("document.querySelector('#topology').value = arguments[0]", machine)
                browser.click("#go")
                _wait(browser, f"document.querySelectorAll('[data-state=done]').length >= {number}")
            _wait(browser, "document.querySelectorAll('.compared thead th').length > 2")
            browser.run("document.activeElement.blur(); scrollTo(0, 0)")
            (folder / name).write_bytes(browser.screenshot())


def _wait(browser: Browser, condition: str) -> None:
    """Waits until a condition holds in the page."""
    limit = time.monotonic() + _SECONDS
    while not browser.run(f"return {condition}"):
        if time.monotonic() > limit:
            raise TimeoutError(f"waited in vain for {condition}: {browser.texts('#problem')}")
        time.sleep(0.2)
