"""Progress of long work: the stages it goes through, how much of one is done, and the time left.

Work takes a `Progress` and tells it about each stage. Displays, such as bars on a terminal, are
implementations of it; so is `SilentProgress`, the default everywhere.
"""

from __future__ import annotations

import contextlib
import time
from typing import Protocol


class Progress(Protocol):
    """Is told about the stages of long work, so that a caller can show them.

    Stages follow each other; the next `begin` ends the one before.
    """

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        """Starts a stage.

        Args:
          stage: what begins, such as "Reading the training rows".
          unit: what `update` counts, such as "rows".
          total: number of units in all; None if unknown.
        """
        ...

    def update(self, done: int, share: float | None = None) -> None:
        """Tells how far the stage is.

        Args:
          share: share of the stage's work that is done, 0 to 1. None means `done` of the
            total, if that is known.
        """
        ...

    def within(self, stage: str) -> contextlib.AbstractContextManager[None]:
        """Shows work within the current stage, in any thread, for as long as a `with` block lasts.

        Args:
          stage: the work, such as "Compiling".
        """
        ...

    def say(self, text: str) -> None:
        """Shows a line that stays, such as a decision between two stages."""
        ...

    def close(self) -> None:
        """Ends the last stage. Later stages are not shown."""
        ...


class SilentProgress:
    """A Progress that shows nothing. Base of displays that show a part of what they are told."""

    def begin(self, stage: str, unit: str = "", total: int | None = None) -> None:
        """Does nothing."""

    def update(self, done: int, share: float | None = None) -> None:
        """Does nothing."""

    def within(self, stage: str) -> contextlib.AbstractContextManager[None]:
        """Does nothing."""
        return contextlib.nullcontext()

    def say(self, text: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


# The default of functions that take a Progress.
SILENT = SilentProgress()


class PartProgress(SilentProgress):
    """The progress of a part of a stage: adds the units that were done before the part."""

    def __init__(self, whole: Progress, before: int):
        """Makes the progress of a part."""
        self._whole, self._before = whole, before

    def update(self, done: int, share: float | None = None) -> None:
        """Tells how many units of the part are done."""
        self._whole.update(self._before + done)


class Stage:
    """A stage that has begun: the amount done, its rate, and the time left.

    Attributes:
      unit: what is counted; "" if nothing is.
      total: number of units in all; None if unknown.
      share: share of the work that is done, 0 to 1; None if unknown.
    """

    def __init__(self, name: str, unit: str = "", total: int | None = None):
        """Begins a stage now."""
        self.name, self.unit, self.total = name, unit, total
        self.done = 0
        self.share: float | None = None
        self._started = time.monotonic()
        # Seconds, units and share at the first update. Programs may be compiled before it.
        self._first: tuple[float, int, float] | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the stage began, a little more than zero."""
        return max(time.monotonic() - self._started, 1e-9)

    @property
    def is_complete(self) -> bool:
        """Whether all units of a known total are done."""
        return self.done == self.total

    def update(self, done: int, share: float | None = None) -> None:
        """Notes how far the stage is; see `Progress.update`."""
        self.done = done
        self.share = done / self.total if share is None and self.total else share
        if done and self._first is None:
            self._first = self.seconds, done, self.share or 0.0

    def _rate(self) -> float:
        """Returns the units per second since the first update, or of the whole stage."""
        if self._first is None or self.is_complete or self.done <= self._first[1]:
            return self.done / self.seconds
        seconds, done, _ = self._first
        return (self.done - done) / max(self.seconds - seconds, 1e-9)

    def _seconds_left(self) -> float | None:
        """Returns the seconds left at the rate since the first update; None before the second."""
        if not self.share or self._first is None or self.share <= self._first[2]:
            return None
        seconds, _, share = self._first
        return (self.seconds - seconds) * (1 - self.share) / (self.share - share)

    def describe(self) -> str:
        """Returns the stage with its amount, its rate and the time left, or the time so far."""
        seconds = self.seconds
        if not self.done and self.total is None:
            return f"{self.name}: {duration(seconds)} so far"
        of = "" if self.total is None else f"/{self.total:,}"
        text = f"{self.done:,}{of} {self.unit}  {self._rate():,.0f} {self.unit}/s"
        if self.is_complete:
            text += f"  in {duration(seconds)}"
        elif (left := self._seconds_left()) is not None:
            text += f"  {duration(left)} left"
        return f"{self.name}: {text}"


def duration(seconds: float) -> str:
    """Formats seconds, such as `45 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
