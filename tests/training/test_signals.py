"""Signals as requests."""

import os
import signal

import pytest

from lingvo_gshard.training.signals import StoppedError, StopRequest


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_signal_waits_for_the_step(number, name):
    with StopRequest() as stop:
        stop.finishing = True
        os.kill(os.getpid(), number)
        assert stop.requested == name


def test_a_second_signal_does_not_wait():
    with StopRequest() as stop:
        stop.finishing = True
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_with_nothing_to_finish_it_interrupts():
    with StopRequest(), pytest.raises(StoppedError, match="Ctrl-C"):
        os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
