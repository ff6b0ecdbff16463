"""EngineOptions: how an engine uses its machine."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine uses its machine.

    Attributes:
      workers: threads that decode side by side; 0: one for each core of a CPU, else one.
      rows: the largest number of rows of one batch of a lane, hypotheses counted.
      exact: whether to compile a program of the size that fits best where a larger one is ready.
        That takes seconds for each size, and pays for long jobs.
    """

    workers: int = 0
    rows: int = 32
    exact: bool = False
