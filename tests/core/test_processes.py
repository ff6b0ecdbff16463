"""Communication between processes, seen by a single process; test_cluster.py has several."""

import platform

import pytest

from lingvo_gshard.core import processes, signals
from lingvo_gshard.core.signals import StopRequest


def test_one_process_never_waits():
    assert (processes.count(), processes.index(), processes.is_main()) == (1, 0, True)
    assert processes.gather([1, "a"]) == [[1, "a"]]
    assert processes.from_main({"step": 3}) == {"step": 3}
    assert processes.together(lambda: 5) == 5


def test_one_process_raises_its_own_error():
    def fail():
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        processes.together(fail)


def test_an_error_in_one_process_is_raised_in_all(monkeypatch):
    """Process 0 of 2 succeeds itself and sees the error of process 1."""
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda value: [value, "process 1 on b: no room"])
    with pytest.raises(processes.SharedError, match="^process 1 on b: no room$"):
        processes.together(lambda: 5)


def test_an_error_that_another_process_had_keeps_its_name():
    error = processes.SharedError("process 1 on b: OSError: no room")
    assert processes.problem_of(error) == "process 1 on b: OSError: no room"
    own = f"process 0 on {platform.node()}: OSError: no room"
    assert processes.problem_of(OSError("no room")) == own


def test_a_ballot_returns_the_last_vote():
    ballot = processes.Ballot()
    assert ballot.highest() == 0
    for number in (2, 1):
        ballot.cast(number)
        assert ballot.highest() == number


def test_stop_request_is_agreed_one_announcement_later(monkeypatch):

    stop = StopRequest()
    stop.requested = "SIGTERM"
    assert stop.agreed == "SIGTERM"
    monkeypatch.setattr(signals, "count", lambda: 2)
    assert stop.agreed is None
    stop.announce()
    assert stop.agreed == "SIGTERM"
