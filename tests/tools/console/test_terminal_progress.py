# tests: tools/console/stages.py
"""Tests what a command shows on a terminal before it answers, and nothing elsewhere."""

import io
import sys
import threading
import time

from lingvo_gshard.tools.console import LineProgress, stages_on_terminal


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


def wait_for(text, screen):
    end = time.monotonic() + 10
    while text not in screen.getvalue():
        assert time.monotonic() < end, screen.getvalue()
        time.sleep(0.01)


def test_stages_are_shown_on_a_terminal_and_leave_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with stages_on_terminal() as stages:
        stages.begin("Loading the model")
        with stages.within("Compiling admit"):
            other = threading.Thread(target=lambda: stages.within("Compiling steps").__enter__())
            other.start()
            other.join()
            wait_for("Compiling steps", screen)
        seen = screen.getvalue()
        stages.begin("Translating", "lines")
    for stage in ("Starting", "Loading the model", "Compiling admit", "Compiling steps"):
        assert stage in seen
    last = screen.getvalue().rpartition("\x1b[2K")[2]
    assert not last.strip("\r\n") and "\x1b[?25h" in screen.getvalue()


def test_nothing_is_shown_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with stages_on_terminal() as stages:
        stages.begin("Loading the model")
        with stages.within("Compiling admit"):
            stages.update(3, 0.5)
    assert stream.getvalue() == ""


def test_lines_are_counted_until_answers_take_the_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with LineProgress("Translating") as progress:
        progress.rest()
        for before in (0, 512):
            progress.begin_batch(before)
            progress.update(500)
            progress.before_answers()
        wait_for("Translating: 1,012 lines", screen)
        monkeypatch.setattr(sys, "stdout", Screen())
        progress.begin_batch(1024)
        progress.before_answers()
        progress.update(7)
        assert ": 7 lines" not in screen.getvalue()
        assert "1,031 lines" not in screen.getvalue()
