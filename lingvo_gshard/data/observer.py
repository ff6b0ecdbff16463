"""Observer: is told how far the preparation of data has come."""

import contextlib
from typing import Protocol


class Observer(Protocol):
    """Is told about the stages of long work, so that a caller can show them.

    Stages follow each other; the next `begin` ends the one before.
    """

    def begin(self, stage: str, unit: str = "") -> None:
        """Starts a stage.

        Args:
          stage: what begins, such as "Reading the training rows".
          unit: what `update` counts, such as "rows".
        """
        ...

    def update(self, done: int, share: float | None = None) -> None:
        """Tells how far the stage is.

        Args:
          done: number of units done.
          share: share of the stage's work that is done, 0 to 1; None if unknown.
        """
        ...

    def within(self, stage: str) -> contextlib.AbstractContextManager[None]:
        """Shows work within the current stage, in any thread, for as long as a `with` block lasts.

        Args:
          stage: the work, such as "Compiling".
        """
        ...


class SilentObserver:
    """An Observer that shows nothing."""

    def begin(self, stage: str, unit: str = "") -> None:
        """Does nothing."""

    def update(self, done: int, share: float | None = None) -> None:
        """Does nothing."""

    def within(self, stage: str) -> contextlib.AbstractContextManager[None]:
        """Does nothing."""
        return contextlib.nullcontext()
