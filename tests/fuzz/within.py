"""A limit on the time of what a test calls, also if it waits in the operating system."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def within(seconds: float, what: object = "") -> Iterator[None]:
    """Fails the test if the block takes longer."""

    def late(*_: object) -> None:
        raise AssertionError(f"{what} takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
