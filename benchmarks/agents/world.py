"""World: a job of many hosts that fail at published rates, from its start to its last day."""

from __future__ import annotations

import collections
import dataclasses
import random
import statistics
from collections.abc import Callable

import msgspec

from benchmarks.agents import hosts
from benchmarks.agents.clock import Clock
from benchmarks.agents.hosts import Job, SimulatedHost, Training
from benchmarks.agents.place import KINDS, Place, Troubles
from lingvo_gshard.wings.agents.agent import Agent
from lingvo_gshard.wings.agents.options import AgentOptions
from lingvo_gshard.wings.agents.records import FAILED, LOST, STOPPED, UNMET, Record

DAY = 86400.0
# arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs.
FAILURES_PER_HOST_DAY = 419 / 54 / 2048
# Table 5 there. A host with a faulty GPU, power supply or the like is lost until it is repaired;
# memory errors, software and hangs end a worker; cables and cards cut the workers' network.
WEIGHTS = {"lost": 207, "worker": 175, "network": 37}
# Small worlds have what happens rarely, too.
RARE = {"agent": 60, "asked": 60, "cut": 60, "two": 60}
REPAIR_SECONDS = (3600.0, 12 * 3600.0)
_QUICK_SECONDS = (100.0, 1800.0)
_CUT_SECONDS = 90.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of a world.

    Attributes:
      hosts: hosts that train.
      standby: further hosts.
      min_hosts: fewest hosts that train.
      days: simulated days.
      failures: failures of one host in a day.
      place: a name of `KINDS`.
      beat_seconds: `--beat_seconds` of the agents.
      lost_seconds: `--lost_seconds` of the agents.
      start_seconds: time that workers take from their meeting to their first step.
      has_rare: whether agents are killed, hosts cut off, and the place loses messages, too.
    """

    hosts: int
    standby: int
    min_hosts: int
    days: float
    failures: float
    place: str
    beat_seconds: float
    lost_seconds: float
    start_seconds: float = 120.0
    has_rare: bool = False


@dataclasses.dataclass
class WorldRow:
    """The results of a world.

    Attributes:
      name: the setting in words.
      seed: of the world.
      failures: injected failures.
      rounds: records of rounds.
      first_seconds: until the first round began.
      recovery_seconds: median time from a failure to the next step.
      slowest_seconds: the longest one.
      repeated_steps: mean of the steps that were computed again after a failure.
      goodput: share of the time that went into new steps.
      reads: reads and lists a second while nothing fails.
      writes: writes a second while nothing fails.
      read_megabytes: 10**6 bytes read a second while nothing fails.
      peak_reads: most reads and lists a second within an interval of signs.
      lead_seconds: median time that the agent that leads needs between two pauses.
      problems: broken invariants.
    """

    name: str
    seed: int
    failures: int
    rounds: int
    first_seconds: float
    recovery_seconds: float
    slowest_seconds: float
    repeated_steps: float
    goodput: float
    reads: float
    writes: float
    read_megabytes: float
    peak_reads: float
    lead_seconds: float
    problems: list[str]


@dataclasses.dataclass
class _Stretch:
    """A stretch of time without events.

    Attributes:
      seconds: how long, with what was skipped.
      intervals: the last intervals between two looks, which stand for the whole: the first signs of
        a round name no parts of snapshots.
    """

    seconds: float = 0.0
    intervals: collections.deque[int] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=3)
    )


class World:
    """One job under faults."""

    def __init__(self, setting: Setting, seed: int, skips: bool = True):
        """Prepares hosts that are off.

        Args:
          skips: whether time is skipped while nothing happens.
        """
        self.setting, self.seed, self._skips = setting, seed, skips
        self.random = random.Random(seed)
        self.clock = Clock()
        troubles = Troubles(0.002, 0.002, 0.002, 0.02) if setting.has_rare else Troubles()
        # So long, snapshots are copied and requests counted before something happens.
        self._margin = 3 * setting.beat_seconds + 5
        self.place = Place(self.clock, KINDS[setting.place], troubles, setting.beat_seconds, seed)
        options = AgentOptions(
            max_hosts=setting.hosts,
            min_hosts=setting.min_hosts,
            beat_seconds=setting.beat_seconds,
            lost_seconds=setting.lost_seconds,
            max_restarts=10_000,
            max_host_failures=10_000,
            check_after_failures=0,
            join_seconds=DAY,
            spare=False,
        )
        counts = [n for n in range(setting.min_hosts, setting.hosts + 1) if setting.hosts % n == 0]
        meshes = {n: f"data={n}" for n in counts}
        names = [f"host-{k:04}" for k in range(setting.hosts + setting.standby)]
        training = Training(6.0, setting.start_seconds, 10, 300)
        is_bucket = setting.place != "nfs"
        self.job = Job(self.clock, self.place, options, meshes, training, names, is_bucket, seed)
        self.failures = 0
        # The agents that run and reach the place, and when one of them was lost.
        self._there: set[Agent] = set()
        self._lost_at = 0.0
        self._stretches: list[_Stretch] = []
        self._was_quiet = False
        # Round -> the hosts that failed while it was the newest, and how.
        self.guilty: dict[int, set[tuple[str, str]]] = {}

    def run(self, tell: Callable[[float], None] = lambda _: None) -> WorldRow:
        """Simulates all days and returns what happened.

        Args:
          tell: called at each failure with the share of the days that is over.
        """
        self._tell = tell
        with hosts.replaced(self.job):
            for host in self.job.hosts.values():
                self.clock.at(self.random.uniform(0, 30), host.start)
            self._plan_failure()
            self._watch()
            self.clock.run(self.setting.days * DAY)
            return self._row()

    def _plan_failure(self) -> None:
        rate = self.setting.failures * len(self.job.hosts) / DAY
        if not rate:
            return
        time = max(self.clock.now, 600.0) + self.random.expovariate(rate)
        self.clock.at(time, self._fail, self._margin)

    def _fail(self) -> None:
        weights = WEIGHTS | (RARE if self.setting.has_rare else {})
        kind = self.random.choices(list(weights), list(weights.values()))[0]
        self.failures += 1
        self._tell(self.clock.now / self.setting.days / DAY)
        self._do("lost" if kind == "two" else kind)
        if kind == "two":
            # Another one while the workers start again.
            wait = self.random.uniform(0, 1.5 * self.setting.start_seconds)
            self.clock.at(self.clock.now + wait, lambda: self._do("lost"), self._margin)
        self._plan_failure()

    def _do(self, kind: str) -> None:
        on = [host for host in self.job.hosts.values() if host.agent]
        if len(on) < 2:
            return
        host = self.random.choice(on)
        if kind == "network":
            self._cut_network()
            return
        self._blame(host, kind)
        if kind == "lost":
            if self.random.random() < 0.5 and host.worker is not None:
                # The machine's system ends before its power does.
                host.worker.kill()
            host.lose()
            limits = _QUICK_SECONDS if self.setting.has_rare else REPAIR_SECONDS
            repaired = self.clock.now + self.random.uniform(*limits)
            self.clock.at(repaired, host.start, self._margin)
        elif kind == "worker" and host.worker is not None:
            host.worker.end(1, "failed (XlaRuntimeError: INTERNAL)")
        elif kind == "agent":
            host.kill()
            back = self.clock.now + self.random.uniform(1, 60)
            self.clock.at(back, host.start, self._margin)
        elif kind == "asked":
            host.ask()
            self.clock.at(self.clock.now + 1200, host.start, self._margin)
        elif kind == "cut":
            self.place.cut.add(host.name)
            reached = self.clock.now + _CUT_SECONDS
            self.clock.at(reached, lambda: self.place.cut.discard(host.name))

    def _cut_network(self) -> None:
        """Every worker of the newest round loses another one."""
        newest = self._newest()
        round_ = self.job.rounds.get(newest.number) if newest else None
        for worker in list(round_.workers.values()) if round_ else []:
            worker.end(1, "another process is gone", True)

    def _blame(self, host: SimulatedHost, kind: str) -> None:
        newest = self._newest()
        number = newest.number if newest else 0
        self.guilty.setdefault(number, set()).add((host.name, kind))

    def _newest(self) -> Record | None:
        known = [h.agent._newest for h in self.job.hosts.values() if h.agent]
        return max(filter(None, known), key=lambda record: record.number, default=None)

    def _watch(self) -> None:
        """Skips time while nothing happens."""
        setting, place = self.setting, self.place
        there = {h.agent for h in self.job.hosts.values() if h.agent and h.name not in place.cut}
        if self._there - there:
            self._lost_at = self.clock.now
        # Until a lost agent is known as lost, others may count on it.
        settled = self._lost_at + setting.lost_seconds + 4 * setting.beat_seconds
        is_quiet = there == self._there and self.clock.now > settled and self._is_quiet()
        if is_quiet and not self._was_quiet:
            self._stretches.append(_Stretch())
        elif is_quiet:
            stretch = self._stretches[-1]
            stretch.intervals.append(round(self.clock.awake() / setting.beat_seconds) - 1)
            stretch.seconds += setting.beat_seconds
        if is_quiet and self._skips:
            self._stretches[-1].seconds += self.clock.skip()
        self._there, self._was_quiet = there, is_quiet
        self.clock.at(self.clock.now + setting.beat_seconds, self._watch)

    def _is_quiet(self) -> bool:
        """Returns whether all agents and workers only go on until the next fixed time."""
        newest = self._newest()
        if newest is None or self.place.cut or self.place.is_late:
            return False
        round_ = self.job.rounds.get(newest.number)
        if round_ is None or round_.began is None or round_.ended or round_.is_stopping:
            return False
        running = [host for host in self.job.hosts.values() if host.agent]
        agents = [host.agent for host in running if host.agent]
        if any(one._next or one._newest is not newest and one._newest != newest for one in agents):
            return False
        # In a bucket, two beats, a third of the time, may lie between two proofs at any time.
        share = 1 / 2 if self.job.is_in_bucket else 1 / 3
        if any(one._sightings.misses_some(share) for one in agents):
            return False
        grown = max((n for n in self.job.meshes if n <= len(running)), default=0)
        return grown <= len(newest.members) and not any(host.is_asked for host in running)

    def _records(self) -> list[Record]:
        found = []
        for path, (_, contents) in sorted(self.place._files.items()):
            if "/rounds/" in path and contents[-1]:
                found.append(msgspec.json.decode(contents[-1].split(b"\n")[0], type=Record))
        return sorted(found, key=lambda record: record.number)

    def _check_blame(self, records: list[Record]) -> None:
        kinds = {
            FAILED: {"worker", "lost", "agent", "cut"},
            # The last sign of a host that was asked to stop may be lost.
            LOST: {"lost", "agent", "cut", "asked"},
            STOPPED: {"asked"},
        }
        first = 0
        for before, record in zip(records, records[1:], strict=False):
            failure = record.failure
            if before.failure is None or before.failure.step is not None:
                # Rounds without a step may end before a failure of an earlier round is noticed.
                first = before.number - 1
            if failure is None or failure.kind == UNMET:
                continue
            guilty = {
                host
                for number in range(first, record.number)
                for host, kind in self.guilty.get(number, ())
                if kind in kinds[failure.kind]
            }
            if failure.host not in guilty:
                self.job.problems.append(f"round {record.number} blames {failure}, not {guilty}")

    def _row(self) -> WorldRow:
        records, job, setting = self._records(), self.job, self.setting
        self._check_blame(records)
        for round_ in job.rounds.values():
            if round_.ended is None and round_.began is not None:
                job.note_first_step(round_, self.clock.now)
                job.useful = max(job.useful, round_.base + round_.steps(self.clock.now))
        width = setting.beat_seconds
        stretches = [one for one in self._stretches if one.intervals]
        total = sum(one.seconds for one in stretches)

        def usual(what: str) -> float:
            sums = [
                one.seconds * statistics.mean(self.place.counts[k][what] for k in one.intervals)
                for one in stretches
            ]
            return sum(sums) / total / width if total else 0.0

        first = next((r.began for _, r in sorted(job.rounds.items()) if r.began), float("nan"))
        recoveries = job.recoveries
        return WorldRow(
            name=f"{setting.hosts} hosts, {setting.place}",
            seed=self.seed,
            failures=self.failures,
            rounds=len(records),
            first_seconds=first - setting.start_seconds,
            recovery_seconds=statistics.median(recoveries) if recoveries else 0.0,
            slowest_seconds=max(recoveries, default=0.0),
            repeated_steps=statistics.mean(job.lost_steps[1:]) if job.lost_steps[1:] else 0.0,
            goodput=job.useful * job.training.step_seconds / self.clock.now,
            reads=usual("read"),
            writes=usual("write"),
            read_megabytes=usual("read_bytes") / 1e6,
            peak_reads=max(one["read"] for one in self.place.counts.values()) / width,
            lead_seconds=statistics.median(job.lead_seconds or [0.0]),
            problems=job.problems,
        )
