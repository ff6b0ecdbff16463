# tests: wings/services/progress.py, wings/services/display.py
"""Checks that stages and steps are a bar on a terminal and plain lines elsewhere."""

import io
import re
import time

import rich.console

from lingvo_gshard.training.run.monitoring.step_observer import ObservedRun
from lingvo_gshard.wings.services import progress as progress_lib
from lingvo_gshard.wings.services.display import Display
from lingvo_gshard.wings.services.progress import StageDisplay, Waiting
from tests import tiny


def display_on(console, steps, every):
    """Returns the display of a run's steps, which has begun, and the run."""
    params = tiny.experiment_params(steps=steps)
    params.run.set(log_every_steps=every)
    run = ObservedRun(*(params, None, None, None, None, None, None, None, 1, console), 0)
    display = Display(run)
    display.go_on(None)
    return display, run


def show(**console):
    screen = io.StringIO()
    display, run = display_on(rich.console.Console(file=screen, width=120, **console), 6, 3)
    for step in range(1, 7):
        display.after_step(step, {"loss": 2.0 / step, "accuracy": 0.5, "tokens": 100.0})
    run.say("a line")
    display.at_end()
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


def test_long_work_is_said_at_growing_intervals(monkeypatch):
    monkeypatch.setattr(progress_lib, "_FIRST_WAIT", 0.01)
    said = []
    with Waiting("compiling", lambda text: said.append((time.monotonic(), text))):
        while len(said) < 4:
            time.sleep(0.01)
    times = [when for when, _ in said]
    assert times[3] - times[2] > times[1] - times[0] or times[3] - times[2] >= 0.08
    assert {text[: -len("0 s so far")] for _, text in said} == {"compiling: "}
    with Waiting("compiling", said.append):
        pass
    assert len(said) <= 5


def make_fast(monkeypatch):
    monkeypatch.setattr(progress_lib, "_SHORTEST_SHOWN", 0.04)
    monkeypatch.setattr(progress_lib, "_SECONDS_BETWEEN_LINES", 0.02)
    monkeypatch.setattr(progress_lib, "_ANNOUNCED", 0.0)


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_lines_without_a_terminal(monkeypatch):
    make_fast(monkeypatch)
    stream = io.StringIO()
    with StageDisplay(rich.console.Console(file=stream, width=99)) as progress:
        progress.begin("Reading train", "rows")
        wait_for(lambda: stream.getvalue().startswith("Reading train\n"))
        # The time left is that of the rate after the first update.
        progress.update(250, 0.25)
        progress.update(500, 0.5)
        wait_for(lambda: "left" in stream.getvalue())
        progress.begin("Training a vocabulary")
        wait_for(lambda: "Training a vocabulary: 0 s so far" in stream.getvalue())
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Reading train"
    assert any(line.startswith("Reading train: 500 rows  ") for line in lines)
    assert re.match(r"Training a vocabulary: \d+ s", lines[-1])


def test_short_stages_leave_no_line():
    stream = io.StringIO()
    with StageDisplay(rich.console.Console(file=stream, width=99)) as progress:
        progress.begin("Reading train", "rows")
        progress.update(1, 1.0)
        progress.begin("Cleaning train", "rows")
    assert stream.getvalue() == ""


def test_a_bar_on_a_terminal(monkeypatch):
    make_fast(monkeypatch)
    stream = io.StringIO()
    with StageDisplay(rich.console.Console(file=stream, force_terminal=True, width=99)) as progress:
        progress.begin("Reading train", "rows")
        progress.update(500, 0.5)
        wait_for(lambda: "500 rows" in stream.getvalue())
        progress.begin("Training a vocabulary")
        time.sleep(0.05)
    progress.begin("Reading dev")
    assert "500 rows" in stream.getvalue() and "Training a vocabulary: 0 s" in stream.getvalue()


def test_stages_after_the_end_are_not_shown():
    stream = io.StringIO()
    with StageDisplay(rich.console.Console(file=stream, force_terminal=True, width=99)) as progress:
        progress.begin("Starting")
        progress.close()
        shown = stream.getvalue()
        progress.begin("Tokenizing dev", "rows")
        progress.update(5, 0.5)
    assert "Starting" in shown and stream.getvalue() == shown


def test_a_stage_of_known_size_leaves_a_line_once_all_is_done():
    stream = io.StringIO()
    with StageDisplay(rich.console.Console(file=stream, width=99)) as progress:
        progress.begin("Translating", "rows", 4)
        for done in (1, 2, 4):
            progress.update(done)
        progress.begin("Scoring")
    (line,) = stream.getvalue().splitlines()
    assert re.fullmatch(r"Translating: 4/4 rows  [\d,]+ rows/s  in 0 s", line)


def test_transient_stages_leave_nothing_and_say_nothing_without_a_terminal():
    stream = io.StringIO()
    with StageDisplay(rich.console.Console(file=stream, width=99), is_transient=True) as progress:
        progress.begin("Translating", "rows", 4)
        progress.update(4)
        progress.say("a line")
    assert stream.getvalue() == ""


def test_80_columns_show_bar_time_left_loss_and_rate():
    stream = io.StringIO()
    console = rich.console.Console(file=stream, force_terminal=True, width=80, color_system=None)
    experts = "fullest expert 12.34x  dropped 12.3%  dead experts 12"
    loads = {"load_max_over_mean": 12.34, "dropped_share": 0.123, "dead_experts": 12.0}
    row = {f"layer/{name}": value for name, value in loads.items()}
    display, _ = display_on(console, 12_800, 3)
    for step in (12_798, 12_799):
        display.after_step(step, {"loss": 12.3456, "accuracy": 0.123, "tokens": 12_000.0, **row})
    display.at_end()
    lines = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "\r", stream.getvalue()).replace("\r", "\n")
    first, second = list(filter(str.strip, lines.splitlines()))[-2:]
    shown = r"step 12,799/12,800 [ ━╸╺]{8,} \d+ s left  loss 12\.3456  [\d,.]+ steps/s"
    assert re.fullmatch(shown, first.rstrip()) and len(first) <= 80
    assert second.startswith(f"  accuracy 0.123  {experts}") and len(second) <= 80


def test_other_work_is_shown_in_place_of_the_second_line():
    stream = io.StringIO()
    console = rich.console.Console(file=stream, force_terminal=True, width=80, color_system=None)
    display, _ = display_on(console, 8, 1)
    display.after_step(1, {"loss": 1.0, "accuracy": 0.5})
    with display.working("compiling the evaluation"):
        wait_for(lambda: "  compiling the evaluation 0 s" in stream.getvalue())
    display.at_end()
    assert stream.getvalue().rstrip("\x1b[?25h\n").endswith("  accuracy 0.500")
