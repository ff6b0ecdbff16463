"""Takes screenshots of the planner's page, on light and on dark pages, with headless Chromium."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1180, 1176
_DARK = "--blink-settings=preferredColorScheme=0"


def take(page: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes planner.png and planner_dark.png, the top of a page of `gshard-plan --html`.

    Raises:
      FileNotFoundError: there is no such page, or no Chromium.
    """
    if not page.is_file():
        raise FileNotFoundError(f"--plan={page}: no such file; `gshard-plan --html` writes it")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError("no Chromium on PATH (Debian: apt-get install chromium)")
    command = [browser, "--headless=new", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={WIDTH},{HEIGHT}", "--force-device-scale-factor=1.5"]
    if os.geteuid() == 0:
        # Chromium's sandbox does not run as root.
        command.append("--no-sandbox")
    for name, flags in (("planner.png", []), ("planner_dark.png", [_DARK])):
        target = f"--screenshot={folder / name}"
        url = page.resolve().as_uri()
        subprocess.run([*command, *flags, target, url], check=True, capture_output=True)
