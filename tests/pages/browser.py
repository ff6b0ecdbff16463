"""A headless Chromium, driven over the W3C WebDriver protocol (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVER = "chromedriver"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_SECONDS = 60


def missing() -> str:
    """Returns which program is missing to drive a browser; empty if none is."""
    if not any(map(shutil.which, BROWSERS)):
        return "no Chromium on PATH (Debian: apt-get install chromium chromium-driver)"
    if not shutil.which(DRIVER):
        return "no chromedriver on PATH (Debian: apt-get install chromium-driver)"
    return ""


class Browser:
    """One window; a context manager that ends the browser and its driver.

    Raises RuntimeError with the driver's message if a command fails.
    """

    def __init__(
        self, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False
    ):
        self._driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._root = f"http://127.0.0.1:{self._port()}/session"
        self._session = ""
        try:
            self._session = "/" + self._start(width, height, dark, phone)["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the browser and its driver."""
        try:
            if self._session:
                self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=_SECONDS)
            self._driver.stdout.close()

    def open(self, url: str) -> None:
        """Opens a page and waits until it is loaded."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Runs a script in the page with these arguments and returns its result."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """Clicks in the middle of the element, as a mouse would."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Types into the element, key by key."""
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def hover(self, selector: str) -> None:
        """Moves the mouse to the middle of the element."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        move = {
            "type": "pointerMove", "duration": 0, "x": 0, "y": 0,
            "origin": {_ELEMENT: self._find(selector)},
        }  # fmt: skip
        pointer = {"type": "pointer", "id": "mouse", "actions": [move]}
        self._call("POST", "/actions", {"actions": [pointer]})

    def screenshot(self) -> bytes:
        """Returns a screenshot of the window as PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def texts(self, selector: str) -> list[str]:
        """Returns the text of each element, in order."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.run(script, selector)

    def console(self) -> list[str]:
        """Returns new console messages since the last call, including script and loading errors."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def _port(self) -> int:
        for line in self._driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                return int(found[1])
        raise RuntimeError(f"{DRIVER} did not start: exit code {self._driver.wait()}")

    def _start(self, width: int, height: int, dark: bool, phone: bool) -> dict[str, Any]:
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage"]
        # Disable the browser's own background traffic.
        flags += ["--disable-background-networking", "--disable-component-update"]
        flags.append(f"--window-size={width},{height}")
        if dark:
            flags.append("--blink-settings=preferredColorScheme=0")
        if os.geteuid() == 0:
            # Chromium's sandbox does not run as root, and containers often run tests as root.
            flags.append("--no-sandbox")
        binary = next(path for path in map(shutil.which, BROWSERS) if path)
        options: dict[str, Any] = {"binary": binary, "args": flags}
        if phone:
            # A window has 500 pixels at least.
            screen = {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}
            options["mobileEmulation"] = {"deviceMetrics": screen}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        return self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._root + self._session + path, data, {"Content-Type": "application/json"}
        )
        request.get_method = lambda: method
        # Local connections must not use a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            value = json.load(error)["value"]
            raise RuntimeError(f"{path}: {value['error']}: {value['message']}") from None
