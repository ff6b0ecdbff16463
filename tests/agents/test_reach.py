# tests: wings/agents/meeting.py, wings/agents/agent.py
"""Checks that an agent notices when it cannot meet the others, also in a call that blocks."""

import threading

from lingvo_gshard.wings.agents import meeting
from lingvo_gshard.wings.agents.meeting import Reach

_LONG = 30.0


def test_a_loss_is_told_once_and_again_after_the_next_meeting(monkeypatch):
    monkeypatch.setattr(meeting, "_TICK_SECONDS", 0.01)
    found, losses = threading.Semaphore(0), []

    def lose() -> None:
        losses.append(1)
        found.release()

    watched = Reach(0.05, lose)
    watched.start()
    try:
        assert found.acquire(timeout=_LONG)
        assert not found.acquire(timeout=0.2) and len(losses) == 1
        watched.met()
        assert found.acquire(timeout=_LONG)
    finally:
        watched.close()


def test_an_agent_that_meets_the_others_loses_nothing(monkeypatch):
    monkeypatch.setattr(meeting, "_TICK_SECONDS", 0.01)
    lost = threading.Event()
    watched = Reach(5.0, lost.set)
    watched.start()
    for _ in range(20):
        watched.met()
        assert not lost.wait(0.01)
    watched.close()
