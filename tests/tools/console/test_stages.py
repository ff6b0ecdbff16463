"""Tests the display of stages on a terminal and elsewhere."""

import os
import pty
import re
import sys
import time

import pytest

from lingvo_gshard.tools.console import libraries, output, stages_with_lines
from lingvo_gshard.wings.services import progress

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


def test_long_stage_is_shown_on_a_terminal(terminal):
    with stages_with_lines() as stages:
        stages.begin("compiling")
        stages.begin(LONG)
        # The bar is drawn ten times a second.
        time.sleep(0.5)
    written = terminal()
    assert "still compiling," in written and "starting" in written


def test_long_stages_are_lines_without_a_terminal(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_SHORTEST_SHOWN", 0.1)
    with stages_with_lines("heading") as stages:
        stages.begin("compiling")
        time.sleep(0.2)
        stages.begin("reading")
        stages.say("`mesh=data=2` is tried")
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["heading", "compiling: 0 s", "`mesh=data=2` is tried"]


def test_warnings_are_lines_above_the_bar(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stderr", output.copy_of_standard_error()[0])
    with stages_with_lines() as stages:
        stages.begin("compiling")
        time.sleep(0.3)
        libraries.warn("Warning: one device does nothing")
        time.sleep(0.3)
    lines = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "\r", terminal()).replace("\r", "\n").splitlines()
    assert "Warning: one device does nothing" in lines
