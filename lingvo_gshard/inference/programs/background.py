"""Background: threads that load and compile programs while others decode."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lingvo_gshard.inference.programs.program_key import ProgramKey

# A program that nobody has asked for again within this time is not compiled any more.
_FORGET_SECONDS = 10.0
# A program that could not be made is not tried again before.
_RETRY_SECONDS = 5.0


class Background:
    """Makes programs one after the other, on threads of its own."""

    def __init__(self, make: Callable[[ProgramKey], object], threads: int, name: str):
        """Starts no thread before the first program is wanted.

        Args:
          make: makes a program; what it returns is not used.
          threads: programs that are made at the same time.
          name: of the threads.
        """
        self._make, self._most, self._name = make, threads, name
        self._changed = threading.Condition()
        # When each program that waits was last wanted, and since when others are being made.
        self._wanted: dict[ProgramKey, float] = {}
        self._under_way: dict[ProgramKey, float] = {}
        self._failures: dict[ProgramKey, tuple[float, BaseException]] = {}
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    def want(self, key: ProgramKey, on_end: Callable[[], None]) -> None:
        """Has a program made. To be called again and again while it is wanted.

        Args:
          key: the program.
          on_end: called on the thread that has made some program, or failed to.
        """
        with self._changed:
            if key in self._under_way:
                return
            failed = self._failures.get(key)
            if failed and time.monotonic() - failed[0] < _RETRY_SECONDS:
                return
            self._failures.pop(key, None)
            self._wanted[key] = time.monotonic()
            if len(self._threads) < min(self._most, len(self._wanted) + len(self._under_way)):
                thread = threading.Thread(
                    target=self._run, args=(on_end,), name=self._name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def failure(self, key: ProgramKey) -> tuple[float, BaseException] | None:
        """Returns when making a program last failed, and with which error; None if it has not."""
        return self._failures.get(key)

    def busy(self) -> dict[ProgramKey, float]:
        """Returns since when programs are being made, in the time of time.monotonic."""
        with self._changed:
            return dict(self._under_way)

    def stop(self) -> None:
        """Waits for the programs under way, and ends the threads until another one is wanted."""
        with self._changed:
            self._is_stopped = True
            self._wanted.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self._changed:
            self._threads, self._is_stopped = [], False

    def _run(self, on_end: Callable[[], None]) -> None:
        while key := self._next():
            try:
                self._make(key)
            except BaseException as error:  # Those who need the program learn of it.
                self._failures[key] = time.monotonic(), error
            with self._changed:
                del self._under_way[key]
            on_end()

    def _next(self) -> ProgramKey | None:
        """Returns a program to make, when there is one; None if there will be none."""
        with self._changed:
            while not self._is_stopped:
                for key in list(self._wanted):
                    if time.monotonic() - self._wanted.pop(key) < _FORGET_SECONDS:
                        self._under_way[key] = time.monotonic()
                        return key
                self._changed.wait()
        return None
