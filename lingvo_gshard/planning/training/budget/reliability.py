"""Goodput of many models at once, by the closed formulas, in NumPy."""

from __future__ import annotations

import numpy as np


def goodputs(
    between_failures: float, stall: np.ndarray, write: np.ndarray, restart: np.ndarray
) -> np.ndarray:
    """Returns the expected goodput of trainings that save at Daly's interval.

    The same as `formulas.expected_goodput` at `formulas.daly_interval`, for arrays.

    Args:
      between_failures: mean seconds between two failures of the machine.
      stall: seconds that training waits for a checkpoint.
      write: seconds after that until the checkpoint is complete.
      restart: seconds from a failure until training goes on.
    """
    ratio = stall / (2 * between_failures)
    root = np.sqrt(2 * stall * between_failures)
    daly = root * (1 + np.sqrt(ratio) / 3 + ratio / 9) - stall
    interval = np.where(ratio < 1, daly, between_failures).clip(np.maximum(write - stall, 1.0))
    period = np.minimum((interval + stall) / between_failures, 600.0)
    fixed = np.minimum((restart + write) / between_failures, 600.0)
    return interval / between_failures * np.exp(-fixed) / np.expm1(period)
