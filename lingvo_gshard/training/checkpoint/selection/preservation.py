"""NewestAndBest: which checkpoints of a run are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NewestAndBest:
    """Keeps the newest checkpoints, and the best one. A preservation policy of Orbax.

    Attributes:
      best_step: the step of the best checkpoint; None if there is none.
    """

    def __init__(self, number: int):
        """Makes the policy.

        Args:
          number: number of newest checkpoints.
        """
        self._number = number
        self.best_step: int | None = None

    def kept(self, steps: Sequence[int]) -> list[int]:
        """Returns the steps, of ascending ones, whose checkpoints are kept."""
        newest = set(steps[-self._number :])
        return [step for step in steps if step in newest or step == self.best_step]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether each checkpoint is kept. Orbax calls it before it deletes.

        Args:
          checkpoints: the checkpoints, each with its `step`, ascending.
          context: not used.
        """
        del context
        kept = set(self.kept([each.step for each in checkpoints]))
        return [each.step in kept for each in checkpoints]
