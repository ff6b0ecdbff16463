"""Checks how the end of a worker is told."""

import signal
import sys
import threading

import pytest

from lingvo_gshard.agents.worker import Worker


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
