"""Tests that nothing is recorded outside of the profiled steps, and that a failure ends no run."""

import io
import types

import pytest
import rich.console

from lingvo_gshard.wings.profiling import observer as observer_lib
from lingvo_gshard.wings.profiling.observer import ProfileObserver, profile_steps
from lingvo_gshard.wings.profiling.timeline import StepRange


class Recorder:
    """Stands for the recorder of a trace; `calls` are those of all recorders."""

    calls = ()

    def __init__(self, tracer):
        Recorder.calls = []
        self.recorded = None

    def begin(self, step):
        Recorder.calls.append(("begin", step))
        first = self.recorded.first if self.recorded else step
        self.recorded = StepRange(first, step)

    def start_step(self):
        Recorder.calls.append("start")

    def end(self):
        Recorder.calls.append("end")
        return b"a trace"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(observer_lib, "Recorder", Recorder)
    monkeypatch.setattr(Recorder, "calls", ())
    screen = io.StringIO()
    console = rich.console.Console(file=screen, width=200)
    profiled = []
    monkeypatch.setattr(
        observer_lib, "write_profile", lambda *args: profiled.append(args[1].recorded)
    )
    return types.SimpleNamespace(
        params=types.SimpleNamespace(name="an.experiment"),
        trainer=None,
        runtime=None,
        partitioning=None,
        logdir=types.SimpleNamespace(path=tmp_path),
        first_step=1,
        screen=screen,
        profiled=profiled,
        say=lambda text: console.print(text),
    )


def walk(observer, steps):
    """Takes steps as the training loop does, and returns those before which it finished all."""
    idle = []
    for step in steps:
        if observer.needs_idle(step):
            idle.append(step)
            observer.after_step(step - 1, {})
            observer.while_idle(step)
        observer.before_input(step)
        observer.before_step(step, {})
    return idle


def test_only_the_profiled_steps_are_recorded(run):
    observer = ProfileObserver(run, StepRange(20, 21), print)
    assert walk(observer, range(1, 20)) == []
    assert Recorder.calls == () and run.screen.getvalue() == ""
    assert walk(observer, range(20, 30)) == [20, 22]
    observer.at_end()
    assert Recorder.calls == [("begin", 20), "start", ("begin", 21), "start", "end"]


def test_a_profile_that_fails_is_a_warning(run, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(observer_lib, "write_profile", fail)
    observer = ProfileObserver(run, StepRange(2, 2), pytest.fail)
    walk(observer, range(1, 5))
    said = run.screen.getvalue()
    assert "Warning: `profile_steps`: no profile: OSError: the disk is full" in said


def test_a_run_that_stops_within_the_steps_is_profiled_so_far(run):
    observer = ProfileObserver(run, StepRange(2, 9), print)
    walk(observer, range(1, 4))
    observer.after_step(3, {})
    observer.at_end()
    assert Recorder.calls[-1] == "end"
    assert run.profiled == [StepRange(2, 3)]


def test_an_error_within_a_step_leaves_no_profile(run):
    observer = ProfileObserver(run, StepRange(2, 9), print)
    walk(observer, range(1, 4))
    observer.at_end()
    assert Recorder.calls[-1] == "end" and run.profiled == []


def test_steps_that_come_again_after_a_roll_back_are_profiled_then(run):
    observer = ProfileObserver(run, StepRange(5, 6), lambda result: None)
    walk(observer, range(1, 6))
    walk(observer, range(3, 9))
    assert Recorder.calls == [("begin", 5), "start", ("begin", 6), "start", "end"]
    assert run.profiled == [StepRange(5, 6)]


def test_steps_that_a_resumed_run_has_taken(run):
    run.first_step = 30
    with pytest.raises(ValueError, match=r"`profile_steps=20:23`: the run resumes with step 30"):
        profile_steps(StepRange(20, 23), print)(run)
