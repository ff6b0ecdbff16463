"""Records of the faults: progress while they happen and a table at the end."""

import collections
import dataclasses
import time
from collections.abc import Callable

import rich.table

from tests.soak.run import Run


@dataclasses.dataclass
class Record:
    """One fault.

    Attributes:
      kind: name of the fault.
      ending: how it ended, in a few words.
      step: the last step that was logged when it had ended.
      seconds: when it had ended, since the soak began.
      setup: what the training ran on.
      lost_steps: steps that the next start has to train again because of it.
    """

    kind: str
    ending: str
    step: int
    seconds: float
    setup: str
    lost_steps: int = 0


class Records:
    """The faults of a soak.

    Attributes:
      rows: the faults so far.
      problems: what the training did that it must not do.
    """

    def __init__(self, wanted: int, minutes: float, say: Callable[[str], None]):
        """Starts the clock.

        Args:
          wanted: number of faults after which to end.
          minutes: time after which to end.
          say: shows a line of progress.
        """
        self.rows: list[Record] = []
        self.problems: list[str] = []
        self._wanted = wanted
        self._most_seconds = 60 * minutes
        self._say = say
        self._begun = time.monotonic()
        self._kind = ""
        self._lost_before = 0

    @property
    def seconds(self) -> float:
        """Seconds since the soak began."""
        return time.monotonic() - self._begun

    @property
    def faults_per_hour(self) -> float:
        """Faults per hour up to the newest one."""
        return len(self.rows) / self.rows[-1].seconds * 3600 if self.rows else 0.0

    @property
    def go_on(self) -> bool:
        """Whether faults and time are left."""
        return len(self.rows) < self._wanted and self.seconds < self._most_seconds

    def begin(self, kind: str) -> None:
        """Notes the fault that is about to strike, for a problem that it may show."""
        self._kind = kind

    def add(self, run: Run, kind: str, ending: str) -> None:
        """Records a fault and shows it."""
        step, saved = run.last_step(), max(run.checkpoints(), default=0)
        lost = 0 if run.is_training else max(step - saved - self._lost_before, 0)
        self._lost_before = 0 if run.is_training else self._lost_before + lost
        self.rows.append(Record(kind, ending, step, self.seconds, str(run.setup), lost))
        self._say(
            f"{_clock(self.seconds)}  {len(self.rows)}/{self._wanted}  step {step:,}  "
            f"{kind}: {ending}  ({self.faults_per_hour:.0f} an hour, {self._left()} left)"
        )
        self._kind = "resuming"

    def add_problem(self, run: Run, text: str) -> None:
        """Records that the training did something that it must not do, with its output."""
        after = ", ".join(row.kind for row in self.rows[-2:])
        outputs = " ".join(str(path) for path in run.start.outputs)
        self.problems.append(f"{self._kind} on {run.setup}, after {after}: {text}; see {outputs}")
        self.rows.append(
            Record(self._kind, "PROBLEM", run.last_step(), self.seconds, str(run.setup))
        )
        self._say(f"PROBLEM: {self.problems[-1]}")

    def add_lost(self, steps: int) -> None:
        """Notes the steps between the newest checkpoint and an older one that was read instead."""
        if self.rows:
            self.rows[-1].lost_steps += steps

    def _left(self) -> str:
        seconds = self._most_seconds - self.seconds
        if self.rows:
            pace = self.seconds / len(self.rows)
            seconds = min(seconds, pace * (self._wanted - len(self.rows)))
        return _clock(max(seconds, 0.0))

    def table(self) -> rich.table.Table:
        """Returns a row for each kind of fault."""
        table = rich.table.Table("fault", "count", "how it ended", "steps lost", "most")
        by_kind = collections.defaultdict(list)
        for row in self.rows:
            by_kind[row.kind].append(row)
        for kind, rows in sorted(by_kind.items()):
            endings = collections.Counter(row.ending for row in rows)
            lost = [row.lost_steps for row in rows]
            table.add_row(
                kind,
                str(len(rows)),
                ", ".join(f"{name} {count}" for name, count in endings.most_common()),
                str(sum(lost)),
                str(max(lost)),
            )
        table.add_section()
        lost = [row.lost_steps for row in self.rows] or [0]
        table.add_row("all", str(len(self.rows)), "", str(sum(lost)), str(max(lost)))
        return table


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
