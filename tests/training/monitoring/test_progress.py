"""Checks that progress is a bar on a terminal and plain lines elsewhere."""

import io
import time

import pytest
import rich.console

from lingvo_gshard.training.run.monitoring import progress as progress_lib
from lingvo_gshard.training.run.monitoring.progress import Progress, Waiting, duration


def show(**console):
    screen = io.StringIO()
    with Progress(rich.console.Console(file=screen, width=120, **console), 0, 6, 3) as progress:
        for step in range(1, 7):
            progress.count(100.0)
            progress.update(step, {"loss": 2.0 / step, "accuracy": 0.5})
        progress.say("a line")
    return screen.getvalue()


def test_prints_a_line_every_few_steps():
    lines = show().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 3/6", "step 6/6", "a line"]
    assert "loss 0.3333  accuracy 0.500" in lines[1]
    assert "\x1b" not in show()


def test_a_terminal_gets_a_bar():
    shown = show(force_terminal=True)
    assert "\x1b" in shown and "━" in shown
    assert "compiling 0 s" in shown
    assert "6/6" in shown and "loss 0.3333" in shown and "a line" in shown


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (3600, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations_are_formatted(seconds, words):
    assert duration(seconds) == words


def test_long_work_is_said_at_growing_intervals(monkeypatch):
    monkeypatch.setattr(progress_lib, "_FIRST_WAIT", 0.01)
    said = []
    with Waiting("compiling", lambda text: said.append((time.monotonic(), text))):
        while len(said) < 4:
            time.sleep(0.01)
    times = [when for when, _ in said]
    assert times[3] - times[2] > times[1] - times[0] or times[3] - times[2] >= 0.08
    assert {text for _, text in said} == {"compiling: 0 s so far"}
    with Waiting("compiling", said.append):
        pass
    assert len(said) <= 5
