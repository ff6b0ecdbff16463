"""Simulates trainings that fail, restart from their newest checkpoint, and end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.planning.training.formulas import Interruptions

# Random numbers that are drawn at once, so that memory stays small.
_BLOCK = 2_000_000


@dataclasses.dataclass(frozen=True)
class SimulatedRuns:
    """Simulated trainings. Times are in seconds; S is the number of runs.

    Attributes:
      seconds: [S] time from the start to the last complete checkpoint.
      failures: [S] number of failures.
      restarting: [S] time of starting and restarting.
      saving: [S] time that checkpoints stopped the training, those of lost work excluded.
      work: time of the training without failures and checkpoints.
    """

    seconds: np.ndarray
    failures: np.ndarray
    restarting: np.ndarray
    saving: np.ndarray
    work: float

    @property
    def goodput(self) -> np.ndarray:
        """[S] The part of each run's time that made progress."""
        return self.work / self.seconds

    @property
    def lost(self) -> np.ndarray:
        """[S] Time of work that failures undid, and of waiting for the last checkpoint."""
        return self.seconds - self.work - self.saving - self.restarting


def simulate(
    costs: Interruptions,
    work: float,
    interval: float,
    runs: int,
    seed: int = 0,
    counted: int | None = None,
) -> SimulatedRuns:
    """Returns simulated trainings.

    A run is a sequence of attempts. Each begins with a restart, the first one with the start, and
    ends with a failure or with the end of the training. Times between failures are exponentially
    distributed. All attempts of all runs are drawn together, in blocks.

    Args:
      costs: failures and checkpoints.
      work: time of the training without failures and checkpoints.
      interval: work between two checkpoints.
      runs: number of runs.
      seed: of the random numbers.
      counted: number of failures that the rate was estimated from. If given, each run has a rate of
        its own, from the gamma distribution that so many counts leave.
    """
    generator = np.random.default_rng(seed)
    mean = np.full(runs, costs.between_failures)
    if counted:
        mean /= generator.gamma(counted, 1 / counted, runs)
    seconds, failures, restarting = (np.zeros(runs) for _ in range(3))
    kept = np.zeros(runs)
    left = np.arange(runs)
    for width in _widths(costs, work, interval, runs):
        until = generator.exponential(1.0, (len(left), width)) * mean[left, None]
        ended = _continue(costs, work, interval, until, kept[left])
        kept[left] = ended.kept
        seconds[left] += ended.seconds
        failures[left] += ended.failures
        restarting[left] += ended.restarting
        left = left[~ended.is_done]
        if not len(left):
            break
    saving = np.full(runs, np.ceil(work / interval) * costs.stall)
    return SimulatedRuns(seconds, failures, restarting, saving, work)


@dataclasses.dataclass(frozen=True)
class _Attempts:
    """What a block of attempts adds to each run: arrays of [S], as in `SimulatedRuns`.

    Attributes:
      kept: intervals of work that are kept, those of earlier blocks included.
      is_done: whether the training has ended.
    """

    seconds: np.ndarray
    failures: np.ndarray
    restarting: np.ndarray
    kept: np.ndarray
    is_done: np.ndarray


def _continue(
    costs: Interruptions, work: float, interval: float, until: np.ndarray, kept: np.ndarray
) -> _Attempts:
    """Continues runs by a block of attempts.

    Args:
      until: [S, A] time from the begin of each of A attempts to its failure.
      kept: [S] intervals of work that earlier blocks have kept.
    """
    period = interval + costs.stall
    # An attempt keeps the intervals whose checkpoints were complete when it failed.
    new = np.floor((until - costs.restart - costs.write) / period).clip(0)
    before = kept[:, None] + np.cumsum(new, axis=1) - new
    rest = (work - before * interval).clip(0)
    needed = costs.restart + rest + np.ceil(rest / interval) * costs.stall + costs.write
    ends = until >= needed
    is_done = ends.any(axis=1)
    width = until.shape[1]
    last = np.where(is_done, ends.argmax(axis=1), width)
    failed = np.arange(width) < last[:, None]
    at = np.arange(len(last)), last.clip(max=width - 1)
    end = np.where(is_done, needed[at], 0.0)
    starting = np.minimum(until, costs.restart)
    return _Attempts(
        seconds=(until * failed).sum(axis=1) + end,
        failures=failed.sum(axis=1),
        restarting=(starting * failed).sum(axis=1) + np.where(is_done, costs.restart, 0.0),
        kept=before[:, -1] + new[:, -1],
        is_done=is_done,
    )


def _widths(costs: Interruptions, work: float, interval: float, runs: int) -> Iterator[int]:
    """Yields the number of attempts of each block: about as many as a run has, then fewer."""
    mean = costs.between_failures
    most = max(1, _BLOCK // runs)
    periods = work / mean * (1 + costs.stall / interval)
    width = int(periods + 4 * periods**0.5) + 4
    while True:
        yield min(width, most)
        width = max(4, width // 2) if width <= most else width
