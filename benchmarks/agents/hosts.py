"""Hosts of a simulated job: real agents, with workers and snapshots made up.

The agents, their leaders, meetings and sightings are the library's own. Only what they start or
wait for is replaced: processes, threads, sockets, files and time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks.agents.clock import Clock
from benchmarks.agents.messages import Messages
from benchmarks.agents.place import Place, SwapFile
from lingvo_gshard.core import EXIT_CODES
from lingvo_gshard.wings.agents import agent as agents
from lingvo_gshard.wings.agents import meeting as meetings
from lingvo_gshard.wings.agents.agent import Agent, Host
from lingvo_gshard.wings.agents.leader import Leader
from lingvo_gshard.wings.agents.meeting import Meeting
from lingvo_gshard.wings.agents.options import AgentOptions
from lingvo_gshard.wings.agents.records import Outcome
from lingvo_gshard.wings.agents.sightings import Sightings
from lingvo_gshard.wings.cluster.worker_report import WorkerReport
from lingvo_gshard.wings.services.snapshot_parts import RESTORED, Part

SECRET, PLACE = "simulated", "/place"
# Workers wait for each other so long (`coordinator_timeout`).
_MEET_SECONDS = 60.0
# `peer_monitor`: a machine that vanished is noticed after so long.
_SILENT_SECONDS = 30.0
_SAVE_SECONDS = 20.0
_COPY_SECONDS = 2.0
_STOPPED = EXIT_CODES["SIGTERM"]


@dataclasses.dataclass(frozen=True)
class Training:
    """The training that workers simulate.

    Attributes:
      step_seconds: time of a step.
      start_seconds: from the meeting of all workers until they compute.
      snapshot_steps: steps between two snapshots.
      checkpoint_steps: steps between two checkpoints.
    """

    step_seconds: float
    start_seconds: float
    snapshot_steps: int
    checkpoint_steps: int


class Round:
    """The workers of one record.

    Attributes:
      number: of the record.
      workers: index -> worker, of those that have come.
      began: when they compute, or will; None before they have met.
      ended: when the first of them ended; None before.
      base: the step that they restored.
      guilty: hosts with an injected failure in this round, or on the way to it.
    """

    def __init__(self, job: Job, number: int, count: int):
        """Has no workers yet."""
        self.job, self.number, self.count = job, number, count
        self.workers: dict[int, SimulatedWorker] = {}
        self.began: float | None = None
        self.ended: float | None = None
        self.base = 0
        self.is_stopping = False
        self._is_heard = False
        job.clock.at(job.clock.time() + _MEET_SECONDS, self._give_up)

    def steps(self, time: float) -> int:
        """Returns how many steps the round has taken at a time."""
        if self.began is None:
            return 0
        until = time if self.ended is None else min(time, self.ended)
        return max(0, int((until - self.began) / self.job.training.step_seconds))

    def add(self, worker: SimulatedWorker) -> None:
        """Adds a worker. The last one lets all begin."""
        self.workers[worker.index] = worker
        if len(self.workers) == self.count and self.ended is None:
            self.base = self.job.restore(self)
            self.began = self.job.clock.time() + self.job.training.start_seconds
            self.job.check_alone(self)

    def fall(self, worker: SimulatedWorker, is_silent: bool = False) -> None:
        """Ends the others after a worker has ended."""
        time = self.job.clock.time()
        if self.ended is None:
            self.job.note_end(self, time)
            self.ended = time
        if self.began is None or self._is_heard:
            # They wait until they give up, or hear of it already.
            return
        self._is_heard = not is_silent
        for other in self.workers.values():
            if other is not worker and other.is_running:
                delay = _SILENT_SECONDS if is_silent else self.job.random.uniform(0.1, 2)
                self.job.clock.at(time + delay, lambda one=other: one.end(1, "", True))

    def stop(self) -> None:
        """Has all workers save and end."""
        if self.is_stopping or self.ended is not None:
            return
        self.is_stopping = True
        self.job.clock.at(self.job.clock.time() + _SAVE_SECONDS, self._save)

    def _save(self) -> None:
        if self.ended is None and self.began is not None:
            self.ended = self.job.clock.now
            self.job.note_end(self, self.ended)
            self.job.save(self.base + self.steps(self.ended))
        for worker in self.workers.values():
            worker.end(_STOPPED)

    def _give_up(self) -> None:
        if self.began is None:
            self.ended = self.ended or self.job.clock.now
            for worker in list(self.workers.values()):
                worker.end(1, "not all have come", True)


class SimulatedWorker:
    """A worker of one host; what an agent calls of `Worker`."""

    module = None

    def __init__(
        self,
        command: Sequence[Any],
        environment: Mapping[str, str],
        number: int,
        wake: Callable[[], None],
        _: object,
    ):
        """Meets the other workers of its round."""
        self.host, assignment = command
        self.round, self.index = number, assignment.index
        self._environment, self._wake, self._code = environment, wake, None
        self._problem, self._is_consequence = "", False
        self.has_snapshot = bool(environment[RESTORED])
        job = self.host.job
        self.of = job.rounds.get(number) or Round(job, number, assignment.count)
        job.rounds[number] = self.of
        self.host.worker = self
        self.of.add(self)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._code is None

    @property
    def report(self) -> WorkerReport:
        """The last step."""
        steps = self.of.steps(self.host.job.clock.time())
        return WorkerReport(step=self.of.base + steps if steps else None)

    @property
    def outcome(self) -> Outcome:
        """The end."""
        assert self._code is not None
        step = self.report.step
        return Outcome(self.round, self._code, step, self._problem, self._is_consequence)

    def stop(self) -> bool:
        """Asks all workers of the round to save."""
        if self.of.is_stopping:
            return False
        self.of.stop()
        return True

    def end(self, code: int, problem: str = "", is_consequence: bool = False) -> None:
        """Ends it."""
        if self._code is None:
            self._code, self._problem, self._is_consequence = code, problem, is_consequence
            self.of.fall(self)
            self._wake()

    def vanish(self) -> None:
        """Ends the worker with its host, so that the others hear nothing."""
        if self._code is None:
            self._code = -9
            self.of.fall(self, is_silent=True)

    def kill(self, reason: str = "") -> None:
        """Ends it at once."""
        self.end(-9, reason)

    def check(self, *_: float) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class SimulatedKeeper:
    """The parts of snapshots on one host; what an agent calls of `Keeper`."""

    port = 1
    folder = pathlib.Path("/dev/shm/simulated")

    def __init__(self, host: SimulatedHost):
        """Has no parts."""
        self._host = host
        self._own: list[Part] = []
        self._copies: dict[Part, float] = {}
        # Number of the round whose parts are in `_own` -> the newest part.
        self._serial: dict[int, int] = {}

    def parts(self) -> tuple[Part, ...]:
        """Returns the parts that are there."""
        self._refresh()
        now = self._host.job.clock.time()
        return tuple(sorted({*self._own, *(p for p, t in self._copies.items() if t <= now)}))

    def replicate(self, partner: Sequence[Part], address: str, _: int) -> None:
        """Begins to copy the newest part of a partner."""
        if not partner:
            return
        newest, now = partner[-1], self._host.job.clock.time()
        copies = [one for one in self._copies if one.index == newest.index]
        if self._copies.get(newest, now + 1) <= now:
            for one in copies:
                if one not in partner:
                    del self._copies[one]
        elif newest not in self._copies and self._host.job.has(address, newest):
            self._copies[newest] = now + self._host.job.random.uniform(0.5, 1) * _COPY_SECONDS

    def drop_before(self, round_: int, index: int) -> None:
        """Deletes parts of earlier rounds when newer snapshots replace them."""
        self._refresh()
        if self._serial.get(round_, 0) > 1:
            self._own = [p for p in self._own if p.round >= round_]
            self._copies = {p: t for p, t in self._copies.items() if p.round >= round_}

    def tidy(self, is_new: bool) -> None:
        """Does nothing."""

    def clear(self) -> None:
        """Deletes all parts."""
        self._own, self._copies, self._serial = [], {}, {}

    def close(self) -> None:
        """Does nothing: the folder of a killed agent stays."""

    def _refresh(self) -> None:
        """Adds the last two parts that the host's worker has written."""
        worker, job = self._host.worker, self._host.job
        if worker is None or worker.of.began is None:
            return
        every, round_ = job.training.snapshot_steps, worker.of
        serial = round_.steps(job.clock.time()) // every
        if serial == self._serial.get(round_.number):
            return
        self._serial = {round_.number: serial}
        before = [p for p in self._own if p.round != round_.number]
        self._own = before + [
            Part(round_.number, k, round_.base + k * every, round_.count, worker.index)
            for k in (serial - 1, serial)
            if k > 0
        ]


class SimulatedPreparation:
    """Restores the paths of a snapshot if all parts are there."""

    def __init__(self, keeper: SimulatedKeeper, holders: Mapping[Part, Sequence], on_end):
        """Fetches at once. `SimulatedWorker` begins later."""
        job = keeper._host.job
        got = [
            part in keeper.parts() or any(job.has(address, part) for address, _ in having)
            for part, having in holders.items()
        ]
        self.is_over = True
        self.paths = [pathlib.Path(part.name) for part in holders] if got and all(got) else []

    def give_back(self) -> None:
        """Does nothing."""


class SimulatedReach:
    """Calls a function when the place was out of reach; what an agent calls of `Reach`."""

    def __init__(self, clock: Clock, limit: float, on_loss):
        """Prepares to watch."""
        self._clock, self._limit, self._on_loss = clock, limit, on_loss
        self._met, self._is_closed, self._was_told = clock.awake(), False, False

    def start(self) -> None:
        """Begins to watch."""
        self._clock.at(self._clock.time() + self._limit, self._look)

    def met(self) -> None:
        """Notes a meeting."""
        self._met, self._was_told = self._clock.awake(), False

    def close(self) -> None:
        """Ends."""
        self._is_closed = True

    def _look(self) -> None:
        if self._is_closed:
            return
        left = self._met + self._limit - self._clock.awake()
        if left <= 0 and not self._was_told:
            self._was_told = True
            self._on_loss()
        self._clock.at(self._clock.time() + max(left, 1.0), self._look)


class TurnOverError(BaseException):
    """An agent waits. No code of the library catches it.

    Attributes:
      seconds: how long.
    """

    def __init__(self, seconds: float):
        """Says how long."""
        super().__init__()
        self.seconds = seconds


class Wake:
    """Wakes an agent that waits; as `threading.Event`."""

    def __init__(self, host: SimulatedHost):
        """Is not set."""
        self._host, self._is_set = host, False

    def set(self) -> None:
        """Gives the agent its next turn."""
        self._is_set = True
        self._host.plan_turn(0.0)

    def clear(self) -> None:
        """Takes it back."""
        self._is_set = False

    def wait(self, seconds: float) -> None:
        """Ends the turn, unless it is set."""
        if not self._is_set:
            raise TurnOverError(seconds)


class SimulatedHost:
    """A host with its agent.

    Attributes:
      name: of the host.
      is_on: whether it has power.
      agent: its agent; None if it does not run.
      worker: its newest worker; None if it has had none since it has power.
    """

    def __init__(self, job: Job, name: str):
        """Is off."""
        self.job, self.name, self.is_on = job, name, False
        self.agent: Agent | None = None
        self.worker: SimulatedWorker | None = None
        self.keeper = SimulatedKeeper(self)
        self._stop = types.SimpleNamespace(requested=None, finishing=True)
        # Number of the next turn, so that an earlier plan is void.
        self._next_turn = 0

    def start(self) -> None:
        """Starts an agent, and the machine if it is off."""
        if self.agent is not None:
            return
        if not self.is_on:
            self.keeper = SimulatedKeeper(self)
        self.is_on = True
        self._stop = types.SimpleNamespace(requested=None, finishing=True)
        self.job.place.user = self.name
        meeting = Meeting(PLACE, SECRET, self.job.say)
        meeting.is_in_bucket = self.job.is_in_bucket
        meeting._pool = self.job.place  # pyright: ignore[reportAttributeAccessIssue]
        try:
            newest = meeting.newest()
        except OSError:
            # The agent is started again by its host.
            self.job.clock.at(self.job.clock.time() + 5.0, self.start, 0.0)
            return
        self.agent = Agent(
            self.job.options,
            Host(self.name, self.name),
            meeting,
            self.job.meshes,
            lambda assignment: [self, assignment],  # pyright: ignore[reportArgumentType]
            {},
            self.keeper,  # pyright: ignore[reportArgumentType]
            lambda _: [],
            self.job.say,
        )
        self.agent._newest = newest
        self.agent._wake = Wake(self)  # pyright: ignore[reportAttributeAccessIssue]
        limit = self.job.options.lost_seconds
        reach = SimulatedReach(self.job.clock, limit, self.agent._end_worker_out_of_reach)
        self.agent._reach = reach  # pyright: ignore[reportAttributeAccessIssue]
        reach.start()
        self.plan_turn(0.0)

    @property
    def is_asked(self) -> bool:
        """Whether its agent was asked to stop."""
        return self._stop.requested is not None

    def plan_turn(self, seconds: float) -> None:
        """Lets the agent go on after some seconds, instead of when it would have."""
        self._next_turn += 1
        number, time = self._next_turn, self.job.clock.time() + seconds
        self.job.clock.at(time, lambda: self._turn(number))

    def ask(self) -> None:
        """Asks the agent to stop."""
        self._stop.requested = "SIGTERM"
        self.plan_turn(0.0)

    def kill(self) -> None:
        """Kills the agent, whose worker ends with it."""
        self._end_agent()
        if self.worker is not None:
            self.worker.kill()

    def lose(self) -> None:
        """Takes the power away."""
        self._end_agent()
        self.is_on = False
        if self.worker is not None:
            self.worker.vanish()
            self.worker = None
        self.keeper.clear()

    def _turn(self, number: int) -> None:
        if self.agent is None or number != self._next_turn:
            return
        self.job.place.user = self.name
        try:
            self.agent._loop(self._stop)  # pyright: ignore[reportArgumentType]
            self._end_agent()
        except TurnOverError as pause:
            self.plan_turn(pause.seconds)
        if self.agent is not None and self.agent._leads:
            self.job.lead_seconds.append(self.job.clock.spent)

    def _end_agent(self) -> None:
        if self.agent is not None:
            self.agent._reach.close()
        self.agent = None
        self._next_turn += 1


class Job:
    """The hosts of a job, and what the whole of them did.

    Attributes:
      rounds: number -> the workers of a record.
      saved: the step of the newest checkpoint.
    """

    def __init__(
        self,
        clock: Clock,
        place: Place,
        options: AgentOptions,
        meshes: Mapping[int, str | None],
        training: Training,
        names: Sequence[str],
        is_in_bucket: bool,
        seed: int,
    ):
        """Has hosts that are off."""
        self.clock, self.place, self.options, self.meshes = clock, place, options, meshes
        self.training, self.is_in_bucket = training, is_in_bucket
        self.random = random.Random(seed)
        self.rounds: dict[int, Round] = {}
        self.hosts = {name: SimulatedHost(self, name) for name in names}
        self.lead_seconds: list[float] = []
        self.lines: list[str] = []
        self.problems: list[str] = []
        self.saved, self._saved_at = 0, 0.0
        self.useful = 0
        self.failed_at: float | None = None
        self.recoveries: list[float] = []
        self.lost_steps: list[int] = []

    def say(self, text: str) -> None:
        """Keeps a line of an agent."""
        self.lines.append(f"{self.clock.time():.1f} {text}")

    def has(self, address: str, part: Part) -> bool:
        """Returns whether a host has a part."""
        host = self.hosts[address]
        return host.is_on and part in host.keeper.parts()

    def save(self, step: int) -> None:
        """Notes a checkpoint."""
        self.saved = max(self.saved, step)

    def restore(self, round_: Round) -> int:
        """Returns the step that the workers of a round restore."""
        snapshots = {
            Part.parse(worker._environment[RESTORED].split(":")[0])
            for worker in round_.workers.values()
        }
        step = 0
        if None not in snapshots:
            found = {(part.round, part.serial, part.step) for part in snapshots if part}
            if len(found) != 1:
                self.problems.append(f"round {round_.number} restores several snapshots: {found}")
            step = max(step for _, _, step in found)
        base = max(step, self.saved)
        self.lost_steps.append(self.useful - base)
        if base > self.useful:
            self.problems.append(f"round {round_.number} restores step {base} of {self.useful}")
        return base

    def check_alone(self, round_: Round) -> None:
        """Checks that no other round computes when one begins."""
        for other in self.rounds.values():
            if other is not round_ and other.began is not None and other.ended is None:
                self.problems.append(f"rounds {other.number} and {round_.number} are at work")
            if other.number > round_.number and other.began is not None:
                self.problems.append(f"round {round_.number} begins after round {other.number}")

    def note_first_step(self, round_: Round, time: float) -> None:
        """Notes when a round took its first step, if it had by a time."""
        if round_.began is not None and round_.steps(time) and self.failed_at is not None:
            first = round_.began + self.training.step_seconds
            self.recoveries.append(first - self.failed_at)
            self.failed_at = None

    def note_end(self, round_: Round, time: float) -> None:
        """Notes the end of a round, and the checkpoints that it wrote."""
        self.note_first_step(round_, time)
        reached = round_.base + round_.steps(time)
        self.useful = max(self.useful, reached)
        every = self.training.checkpoint_steps
        if round_.began is not None:
            # A checkpoint is there some time after its step.
            done = round_.base + round_.steps(time - _SAVE_SECONDS)
            self.save(max(self.saved, done // every * every) if done > round_.base else self.saved)
        if self.failed_at is None:
            self.failed_at = time


@contextlib.contextmanager
def replaced(job: Job) -> Iterator[None]:
    """Gives all agents the clock and the place of a job instead of this machine's."""
    clock, place = job.clock, job.place

    class Health:
        """A check that finds nothing."""

        keeps_out = False

        def __init__(self, *_: object):
            """Does nothing."""

        def begin(self) -> None:
            """Does nothing."""

        poll = close = begin

    messages = Messages()
    with (
        mock.patch.multiple(
            agents,
            Sightings=lambda meeting, life, lost: Sightings(meeting, life, lost, clock.awake),
            Leader=lambda options, meshes, seen: Leader(options, meshes, seen, clock.time),
            Worker=SimulatedWorker,
            HealthCheck=Health,
            Preparation=SimulatedPreparation,
            random=job.random,
            _free_port=lambda: 7000,
        ),
        mock.patch.multiple(
            meetings,
            objects=place,
            pack=messages.pack,
            unpack=messages.unpack,
            atomic=types.SimpleNamespace(decode=messages.decode),
            is_bucket=lambda _: True,
            CompareAndSwapFile=lambda path: SwapFile(place, path),
        ),
    ):
        yield
