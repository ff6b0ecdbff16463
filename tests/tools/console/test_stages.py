"""Tests the display of stages on a terminal and elsewhere."""

import os
import pty
import re
import time

import pytest

from lingvo_gshard.tools.console import libraries, output
from lingvo_gshard.tools.console.stages import Stages

LONG = "still compiling, " * 10


@pytest.fixture
def terminal(monkeypatch):
    """Standard error as a terminal of 80 columns; the value reads what was written to it."""
    reader, writer = pty.openpty()
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(output, "copy_of_standard_error", lambda: (stream, False))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    yield lambda: os.read(reader, 2**16).decode()
    stream.close()
    os.close(reader)


def test_long_stage_stays_above_the_spinner(terminal):
    with Stages() as stages:
        stages.begin("compiling")
        stages.begin(LONG)
        # The spinner is drawn ten times a second.
        time.sleep(0.5)
    written = terminal()
    assert LONG.strip() in " ".join(written.replace("\r\n", "").split())
    assert "compiling " in written


def test_stages_are_lines_without_a_terminal(capfd):
    with Stages("heading") as stages:
        stages.begin("compiling")
        stages.begin(LONG)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["heading", "compiling", LONG]


def test_warnings_are_lines_above_the_spinner(terminal):
    with Stages() as stages:
        stages.begin("compiling")
        time.sleep(0.3)
        libraries.warn("Warning: one device does nothing")
        time.sleep(0.3)
    lines = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "\r", terminal()).replace("\r", "\n").splitlines()
    assert "Warning: one device does nothing" in lines
