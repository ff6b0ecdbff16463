# tests: wings/agents/worker.py, wings/cluster/worker_report.py
"""Checks how the end of a worker is told."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from lingvo_gshard.wings.agents.worker import Worker
from tests.agents.test_agents import is_running


@pytest.fixture
def start():
    """Starts workers that run a Python text. Returns a worker, and an event of its end."""
    started = []

    def make(text: str) -> tuple[Worker, threading.Event]:
        ended = threading.Event()
        started.append(Worker([sys.executable, "-S", "-c", text], {}, 3, ended.set))
        return started[-1], ended

    yield make
    for worker in started:
        worker.kill()
        worker.close()


def test_a_request_that_meets_no_handler_is_a_stop_and_no_failure(start):
    worker, ended = start("import time; time.sleep(1000)")
    assert worker.stop() and not worker.stop()
    assert ended.wait(30)
    assert worker.outcome.code == 143 and not worker.outcome.is_failure


def test_a_signal_of_somebody_else_is_a_failure(start):
    worker, ended = start("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert ended.wait(30)
    assert worker.outcome.code == -signal.SIGTERM and worker.outcome.is_failure


def test_a_worker_leaves_the_warning_of_a_scheduler_to_its_agent(start):
    worker, ended = start("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)")
    assert ended.wait(30)
    assert worker.outcome.code == 0


def test_what_an_agent_has_started_ends_when_the_agent_is_killed():
    """A worker, and a check of the host."""
    text = """
import sys, time
from lingvo_gshard.wings.agents.health import HealthCheck
from lingvo_gshard.wings.agents.worker import Worker
sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(1000)"]
worker = Worker(sleeps, {}, 1, lambda: None)
check = HealthCheck(lambda path: sleeps, print, lambda: None)
check.begin()
print(worker._process.pid, check._process.pid, flush=True)
time.sleep(1000)
"""
    agent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    started = list(map(int, agent.stdout.readline().split()))
    assert len(started) == 2
    agent.kill()
    agent.communicate()
    deadline = time.monotonic() + 20
    while any(map(is_running, started)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
