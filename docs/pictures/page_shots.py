"""Takes screenshots of self-contained pages, light and dark, with headless Chromium."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH = 1180
_DARK = "--blink-settings=preferredColorScheme=0"


def take(page: pathlib.Path, folder: pathlib.Path, name: str, height: int, scale: float) -> None:
    """Writes NAME.png and NAME_dark.png, the top of a page.

    Args:
      page: the page, such as `gshard-plan --html` writes it.
      folder: where to write.
      name: name of the pictures.
      height: pixels of the page that are shown.
      scale: pixels of the picture for each of these.

    Raises:
      FileNotFoundError: there is no such page, or no Chromium.
    """
    if not page.is_file():
        raise FileNotFoundError(f"--{name}={page}: no such file")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError("no Chromium on PATH (Debian: apt-get install chromium)")
    command = [browser, "--headless=new", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={WIDTH},{height}", f"--force-device-scale-factor={scale}"]
    if os.geteuid() == 0:
        # Chromium's sandbox does not run as root.
        command.append("--no-sandbox")
    for file, flags in ((f"{name}.png", []), (f"{name}_dark.png", [_DARK])):
        target = f"--screenshot={folder / file}"
        url = page.resolve().as_uri()
        subprocess.run([*command, *flags, target, url], check=True, capture_output=True)
