"""EngineOptions: how an engine uses its machine."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Options for the use that an engine makes of its machine.

    Attributes:
      workers: threads that decode side by side; 0: one for each core of a CPU, else one.
      rows: the largest number of texts of one batch of a lane.
      hypotheses: the largest number of hypotheses of one batch of a lane.
      exact: whether to compile a program of the size that fits best where a larger one is ready.
        That takes seconds for each size, and pays for long jobs.
    """

    workers: int = 0
    rows: int = 32
    hypotheses: int = 128
    exact: bool = False

    def most_texts(self, beam: int) -> int:
        """Returns the largest number of texts of one batch, each with `beam` hypotheses."""
        return max(min(self.rows, self.hypotheses // beam), 1)
