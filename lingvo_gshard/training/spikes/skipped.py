"""The batches of a run that roll backs skip, and the input without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lingvo_gshard.data.input import Batch, TrainBatches


@dataclasses.dataclass(frozen=True)
class SkippedBatches:
    """Ranges of batches that no step trains on. Batches are counted from 1.

    Attributes:
      ranges: pairs (first, last), both included, which may overlap.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self.ranges)

    def plus(self, first: int, last: int) -> SkippedBatches:
        """Returns these batches and one more range."""
        return SkippedBatches((*self.ranges, (first, last)))

    def batch_of_step(self, step: int) -> int:
        """Returns the number of the batch that a step trains on; 0 for step 0."""
        number = step
        for first, last in _merged(self.ranges):
            if step == 0 or number < first:
                break
            number += last - first + 1
        return number


class BatchesWithoutSkipped:
    """The training batches of an input, without those that are skipped.

    Its position is that of the input, so that it does not depend on what is skipped.
    """

    def __init__(self, batches: TrainBatches, skipped: SkippedBatches):
        """Takes over the batches.

        Args:
          batches: the input's batches, at their beginning.
          skipped: the batches to leave out.
        """
        self._batches = batches
        self._skipped = skipped
        self._number = 0

    def __next__(self) -> Batch:
        while self._number + 1 in self._skipped:
            next(self._batches)
            self._number += 1
        batch = next(self._batches)
        self._number += 1
        return batch

    def get_state(self) -> Any:
        """Returns the input's position after the last batch."""
        return self._batches.get_state()

    def move(self, step: int, position: Any, skipped: SkippedBatches) -> None:
        """Goes on after a step.

        Args:
          step: the step.
          position: the input's position after the batch of the step.
          skipped: the batches to leave out.
        """
        self._batches.set_state(position)
        self._skipped = skipped
        self._number = skipped.batch_of_step(step)

    def close(self) -> None:
        """Stops background work of the input."""
        self._batches.close()


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the same numbers as ranges in order that do not overlap."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], last)
        else:
            merged.append((first, last))
    return merged
