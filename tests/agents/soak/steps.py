"""Steps: what the logs of the hosts say about the steps that were taken, repeated and delayed."""

import dataclasses
import pathlib
import re
import statistics
from collections.abc import Sequence

_STEP = re.compile(r"^step (\d+) at ([\d.]+)$", re.MULTILINE)
# A longer time between two steps is an interruption, a shorter one is noise.
_INTERRUPTION = 1.0


@dataclasses.dataclass(frozen=True)
class Lost:
    """What was lost between two times.

    Attributes:
      steps: steps that were taken again, in each restart.
      idle_seconds: time without steps, beyond the usual time of a step.
      seconds: the idle time, and the time of the steps that were taken again.
    """

    steps: tuple[int, ...]
    idle_seconds: float
    seconds: float


class Steps:
    """The steps of a job, in the order of time. All hosts share one monotonic clock."""

    def __init__(self, taken: Sequence[tuple[float, int]]):
        """Keeps the steps.

        Args:
          taken: the time when each step ended, and its number.
        """
        self._taken = sorted(taken)

    @classmethod
    def of(cls, logs: Sequence[pathlib.Path]) -> "Steps":
        """Reads the steps from the logs of all hosts."""
        texts = (log.read_text("utf-8", "replace") for log in logs)
        return cls([(float(at), int(n)) for text in texts for n, at in _STEP.findall(text)])

    @property
    def usual_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(gap for gap, _, _ in self._gaps(0.0, float("inf")))

    def kept(self, begin: float, end: float) -> int:
        """Returns how many steps the job was further at a time than at an earlier time."""
        found = [step for at, step in self._taken if begin <= at <= end]
        return found[-1] - found[0] if found else 0

    def lost(self, begin: float, end: float) -> Lost:
        """Returns what was lost between two times."""
        usual = self.usual_seconds
        gaps = self._gaps(begin, end)
        again = tuple(before + 1 - after for _, before, after in gaps if after <= before)
        idle = sum(gap - usual for gap, _, _ in gaps if gap > _INTERRUPTION)
        return Lost(again, idle, idle + sum(again) * usual)

    def _gaps(self, begin: float, end: float) -> list[tuple[float, int, int]]:
        """Returns the time between two steps, and both numbers.

        Of the pairs of steps, those count whose middle lies between the times: an interruption
        begins with the last step before a fault, and may end after the next one.
        """
        pairs = zip(self._taken, self._taken[1:], strict=False)
        return [
            (later - at, step, next_step)
            for (at, step), (later, next_step) in pairs
            if begin <= (at + later) / 2 <= end
        ]
