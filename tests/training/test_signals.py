"""Checks that signals become requests that the loop reads."""

import os
import signal

import pytest

from lingvo_gshard.training.signals import StoppedError, StopRequest


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_first_signal_lets_the_step_finish(number, name):
    with StopRequest() as stop:
        stop.finishing = True
        os.kill(os.getpid(), number)
        assert stop.requested == name


def test_second_signal_interrupts_immediately():
    with StopRequest() as stop:
        stop.finishing = True
        os.kill(os.getpid(), signal.SIGTERM)
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
