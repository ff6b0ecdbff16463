"""Tests DataProgress: lines without a terminal, a bar on one."""

import io
import re
import time

import rich.console

from lingvo_gshard.training.run.monitoring import data_progress
from lingvo_gshard.training.run.monitoring.data_progress import DataProgress


def make_fast(monkeypatch):
    monkeypatch.setattr(data_progress, "_SHORTEST_SHOWN", 0.04)
    monkeypatch.setattr(data_progress, "_SECONDS_BETWEEN_LINES", 0.02)
    monkeypatch.setattr(data_progress, "_ANNOUNCED", 0.0)


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def test_lines_without_a_terminal(monkeypatch):
    make_fast(monkeypatch)
    stream = io.StringIO()
    with DataProgress(rich.console.Console(file=stream, width=99)) as progress:
        progress.begin("Reading train", "rows")
        wait_for(lambda: stream.getvalue().startswith("Reading train\n"))
        progress.update(500, 0.5)
        wait_for(lambda: "left" in stream.getvalue())
        progress.begin("Training a vocabulary")
        wait_for(lambda: "so far" in stream.getvalue())
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Reading train"
    assert any(line.startswith("Reading train: 500 rows  ") for line in lines)
    assert re.match(r"Training a vocabulary: \d+ s", lines[-1])


def test_short_stages_leave_no_line():
    stream = io.StringIO()
    with DataProgress(rich.console.Console(file=stream, width=99)) as progress:
        progress.begin("Reading train", "rows")
        progress.update(1, 1.0)
        progress.begin("Cleaning train", "rows")
    assert stream.getvalue() == ""


def test_a_bar_on_a_terminal(monkeypatch):
    make_fast(monkeypatch)
    stream = io.StringIO()
    with DataProgress(rich.console.Console(file=stream, force_terminal=True, width=99)) as progress:
        progress.begin("Reading train", "rows")
        progress.update(500, 0.5)
        wait_for(lambda: "500 rows" in stream.getvalue())
        progress.begin("Training a vocabulary")
        time.sleep(0.05)
    progress.begin("Reading dev")
    assert "500 rows" in stream.getvalue() and "Training a vocabulary: 0 s" in stream.getvalue()


def test_stages_after_the_end_are_not_shown():
    stream = io.StringIO()
    with DataProgress(rich.console.Console(file=stream, force_terminal=True, width=99)) as progress:
        progress.begin("Starting")
        progress.close()
        shown = stream.getvalue()
        progress.begin("Tokenizing dev", "rows")
        progress.update(5, 0.5)
    assert "Starting" in shown and stream.getvalue() == shown
