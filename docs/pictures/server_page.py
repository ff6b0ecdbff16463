"""Takes screenshots of the page of gshard-serve, on light and on dark pages, with a browser."""

from __future__ import annotations

import pathlib
import time

from tests.pages.browser import Browser

WIDTH, HEIGHT = 900, 1740
SENTENCE = "No se pudo guardar el archivo."
# The token that is looked at.
_PICKED = ".token:nth-child(4)"
_SECONDS = 300.0


def take(url: str, folder: pathlib.Path) -> None:
    """Writes server.png and server_dark.png: a sentence and its translation.

    Args:
      url: address of a server of the quickstart's model.
      folder: where to write.

    Raises:
      TimeoutError: the server does not answer.
    """
    for name, is_dark in (("server.png", False), ("server_dark.png", True)):
        with Browser(WIDTH, HEIGHT, is_dark) as browser:
            browser.open(url)
            browser.type("#text", SENTENCE)
            browser.click("#go")
            limit = time.monotonic() + _SECONDS
            while not browser.texts("#best"):
                if time.monotonic() > limit:
                    raise TimeoutError(f"{url} does not answer: {browser.texts('#problem')}")
                time.sleep(0.1)
            browser.click(_PICKED)
            browser.hover("#name")
            browser.run("document.activeElement.blur(); scrollTo(0, 0)")
            (folder / name).write_bytes(browser.screenshot())
