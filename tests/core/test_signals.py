"""Checks that signals become requests that the loop reads."""

import asyncio
import os
import signal
import threading

import pytest

from lingvo_gshard.core import signals
from lingvo_gshard.core.signals import CLOSED_OUTPUT, StoppedError, StopRequest


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (1, "SIGHUP")],
)
def test_first_signal_lets_the_step_finish(number, name):
    with StopRequest() as stop:
        stop.finishing = True
        os.kill(os.getpid(), number)
        assert stop.requested == name


def test_second_signal_interrupts_immediately(monkeypatch):
    with StopRequest() as stop:
        stop.finishing = True
        os.kill(os.getpid(), signal.SIGTERM)
        # At once it is part of the first one, as schedulers send several.
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(signals, "REPEAT_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_signal_before_training_interrupts():
    with StopRequest(), pytest.raises(StoppedError, match="Ctrl-C"):
        os.kill(os.getpid(), signal.SIGINT)


def test_previous_signal_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_request_lets_the_step_finish_or_raises():
    with StopRequest() as stop:
        with pytest.raises(StoppedError, match="closed standard output"):
            stop.request(CLOSED_OUTPUT)
        with pytest.raises(StoppedError):
            stop.raise_if_stopped()
    with StopRequest() as stop:
        stop.finishing = True
        stop.request(CLOSED_OUTPUT)
        stop.request("SIGTERM")
        stop.raise_if_stopped()
        assert stop.agreed == CLOSED_OUTPUT


def test_other_threads_may_train():
    def train():
        with StopRequest() as stop:
            stop.request(CLOSED_OUTPUT)
            requested.append(stop.requested)

    requested = []
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert requested == [CLOSED_OUTPUT]


def test_neither_asyncio_nor_a_handler_of_exceptions_swallows_a_stop():
    async def work():
        try:
            raise StoppedError("Ctrl-C")
        except Exception:
            return "swallowed"

    with pytest.raises(StoppedError):
        asyncio.run(work())
