"""Agent: starts the worker of one host, watches it, and agrees with the other agents on the next.

Agents meet in a `Meeting`. Each writes a sign of life and reads the newest record. The first agent
that lives leads: it reads the signs of all others and writes the next record (`Leader`). A record
names the hosts of a round, the address where their workers meet, and the mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from lingvo_gshard.core import EXIT_CODES, called_before_abrupt_end, signals
from lingvo_gshard.wings.agents.health import HealthCheck
from lingvo_gshard.wings.agents.keeper import Keeper, Preparation
from lingvo_gshard.wings.agents.leader import Leader
from lingvo_gshard.wings.agents.meeting import Reach
from lingvo_gshard.wings.agents.options import AgentOptions
from lingvo_gshard.wings.agents.records import Beat, Member, Outcome, Record
from lingvo_gshard.wings.agents.sightings import AnyMeeting, Sightings
from lingvo_gshard.wings.agents.spare import Spare
from lingvo_gshard.wings.agents.stragglers import Stragglers
from lingvo_gshard.wings.agents.worker import Worker, start_process, words_of
from lingvo_gshard.wings.services.run_lock import ROUND
from lingvo_gshard.wings.services.snapshot_parts import FOLDER, RESTORED

_FASTER = 60


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The place of one worker in a round.

    Attributes:
      index: number of the worker, from 0.
      coordinator: host:port where they meet.
      mesh: the mesh of the round; None leaves the command's own.
    """

    index: int
    count: int
    coordinator: str
    mesh: str | None


@dataclasses.dataclass(frozen=True)
class Host:
    """A host as its agent presents it.

    Attributes:
      name: differs from the names of all other hosts.
      address: where other hosts reach it.
      alive_file: file to touch with each sign of life; None for none.
      rack: what fails together with it; "" if it is not known.
    """

    name: str
    address: str
    alive_file: str | None = None
    rack: str = ""


class Agent:
    """The agent of one host, from its start to the end of the job."""

    def __init__(
        self,
        options: AgentOptions,
        host: Host,
        meeting: AnyMeeting,
        meshes: Mapping[int, str | None],
        command: Callable[[Assignment], Sequence[str]],
        environment: Mapping[str, str],
        keeper: Keeper,
        check: Callable[[str], Sequence[str]],
        say: Callable[[str], None],
    ):
        """Makes an agent that has not met anybody yet.

        Args:
          meshes: number of hosts -> mesh, for each number that can train.
          command: returns the command of a worker.
          environment: variables for workers, in addition to the variables of this process.
          keeper: of the snapshots on this host.
          check: returns the command that checks this host, as in `HealthCheck`.
        """
        self._keeper = keeper
        self._options, self._host, self._meeting = options, host, meeting
        self._command, self._environment, self._say = command, environment, say
        self._life, self._count = secrets.token_hex(8), 0
        self._sightings = Sightings(meeting, self._life, options.lost_seconds)
        self._leader = Leader(options, meshes, self._sightings)
        self._stragglers = Stragglers()
        self._worker: Worker | None = None
        # The next worker, and the newest round that has started a spare.
        self._spare: Spare | None = None
        self._spare_round = 0
        # The worker to start when its part of a snapshot is there.
        self._next: tuple[Record, Assignment, Preparation] | None = None
        # The worker has not yet read it; None if it has.
        self._preparation: Preparation | None = None
        self._outcome: Outcome | None = None
        self._newest: Record | None = None
        self._leads = False
        # The exit code of an agent that was asked to stop; None if it was not.
        self._leaving: int | None = None
        self._code: int | None = None
        self._wake = threading.Event()
        self._health = HealthCheck(check, say, self._wake.set)
        self._reach = Reach(options.lost_seconds, self._end_worker_out_of_reach)
        # Why the meeting place could not be reached last, in parentheses.
        self._problem = ""

    def run(self) -> int:
        """Takes part in the job until it ends or this host is asked to stop.

        Returns:
          The exit code: 0 after the last step, 1 if the job failed, else the code of the
          request to stop.

        Raises:
          OSError: a worker cannot be started.
        """
        self._newest = self._meeting.newest()
        is_new = self._newest is None or self._newest.code is not None
        self._keeper.tidy(is_new)
        if is_new:
            # Parts of an earlier job.
            self._keeper.clear()
        elif self._was_lost():
            self._check_after_failure()
        self._reach.start()
        with signals.StopRequest() as stop, called_before_abrupt_end(self._kill_worker):
            # A request lets this loop go on until the worker has saved.
            stop.finishing = True
            # Slurm sends it some time before the limit of a job.
            signal.signal(signal.SIGUSR1, lambda *_: stop.request("SIGTERM"))
            try:
                self._loop(stop)
            finally:
                self._kill_worker()
                if self._spare:
                    self._spare.close()
                self._reach.close()
                self._health.close()
                if self._newest and self._newest.code is not None:
                    # Parts of hosts that were lost on the way.
                    self._keeper.tidy(is_new=True)
                self._keeper.close()
        assert self._code is not None
        return self._code

    def _loop(self, stop: signals.StopRequest) -> None:
        while self._code is None:
            self._heed(stop)
            self._start_worker()
            self._watch_worker()
            self._keep_spare()
            self._health.poll()
            try:
                self._meet()
                self._reach.met()
            except OSError as error:
                self._problem = f" ({error})"
            is_idle = self._worker is None and self._next is None
            if self._leaving is not None and is_idle and self._code is None:
                self._code = self._leaving
            if self._code is None:
                self._wake.wait(self._pause())
                self._wake.clear()

    def _pause(self) -> float:
        """Returns the time until the next sign.

        While somebody puts old signs back, signs are written and read more often, so that some are
        read before they are replaced, and at random times, since who reads in step with another's
        writing may miss every sign. In a bucket, requests are too slow for that.
        """
        is_hard = self._meeting.is_disturbed or self._sightings.misses_some()
        is_fast = is_hard and not self._meeting.is_in_bucket
        beat_seconds = self._options.beat_seconds
        return random.uniform(0, 2 * beat_seconds / _FASTER) if is_fast else beat_seconds

    def _heed(self, stop: signals.StopRequest) -> None:
        """Has the worker save if this host was asked to stop."""
        if stop.requested and self._leaving is None:
            self._leaving = EXIT_CODES[stop.requested]
            self._next = None
            if self._worker:
                self._worker.stop()

    def _start_worker(self) -> None:
        """Starts the worker of the round if its part of a snapshot is there, or cannot be had."""
        if self._next is None or not self._next[2].is_over:
            return
        (record, assignment, preparation), self._next = self._next, None
        environment = {
            **self._environment,
            ROUND: str(record.number),
            FOLDER: str(self._keeper.folder),
            RESTORED: os.pathsep.join(map(str, preparation.paths)),
        }
        self._preparation = preparation
        command, spare, self._spare = self._command(assignment), self._spare, None
        self._worker = Worker(command, environment, record.number, self._wake.set, spare)

    def _keep_spare(self) -> None:
        """Starts a spare after the worker's first step, until which the worker needs the host.

        A round starts one spare at most.
        """
        worker = self._worker
        if not self._options.spare or worker is None or worker.round == self._spare_round:
            return
        if worker.module and worker.report.step is not None:
            self._spare_round = worker.round
            with contextlib.suppress(OSError):
                # Without a spare, the next worker starts as the first one did.
                self._spare = self._spare or Spare(worker.module, start_process)

    def _watch_worker(self) -> None:
        """Notes the end of the worker."""
        if self._worker is None:
            return
        self._worker.check(self._options.start_seconds, self._options.lost_seconds)
        if self._worker.is_running:
            return
        self._outcome = self._worker.outcome
        if self._outcome.code and not self._outcome.is_consequence:
            self._say(f"The worker of {self._host.name} {words_of(self._outcome)}")
        self._worker.close()
        self._worker = None
        if self._outcome.is_failure:
            self._check_after_failure()
        if self._outcome.code == 0 and self._leaving is not None:
            self._leaving = 0

    def _was_lost(self) -> bool:
        """Returns whether an earlier agent of this host ended without being asked to."""
        before = self._meeting.beat(self._host.name)
        has_left = before is not None and before.is_leaving
        known = self._newest is not None and self._newest.has_lost(self._host.name, self._life)
        return known and not has_left

    def _check_after_failure(self) -> None:
        """Checks this host if it has failed often enough, the failure just found included."""
        enough = self._options.check_after_failures
        known = self._leader.failures_of(self._host.name, self._newest) if self._newest else 0
        if enough and known + 1 >= enough and self._leaving is None:
            self._say(f"Failures of this host within an hour: {known + 1}; gshard-doctor checks it")
            self._health.begin()

    def _meet(self) -> None:
        """Gives a sign of life, follows the newest record, and leads if no other agent does."""
        self._beat()
        leader = self._leading_sign()
        known = self._newest.number if self._newest else 0
        self._follow(self._meeting.newest(known, leader.newest if leader else 0))
        self._keep_parts()
        self._leads = leader is None and self._leaving is None
        if self._leads and self._code is None:
            self._lead()

    def _beat(self) -> None:
        self._count += 1
        self._sightings.wrote(self._count)
        report = self._worker.report if self._worker else None
        self._meeting.write_beat(
            Beat(
                self._host.name,
                self._life,
                self._count,
                self._host.address,
                _free_port(),
                self._leaving is not None,
                self._outcome,
                self._newest.number if self._newest and self._leads else 0,
                report.step if report else None,
                report.input_seconds if report else None,
                report.probe_seconds if report else None,
                self._keeper.parts(),
                self._keeper.port,
                self._health.keeps_out,
                self._sightings.heard(),
                self._host.rack,
                self._told(),
            )
        )
        if self._host.alive_file is not None:
            pathlib.Path(self._host.alive_file).touch()

    def _told(self) -> tuple[Beat, ...]:
        """Returns the signs that this host reads for the agent that leads; none if it cannot."""
        group = self._newest.group_of(self._host.name, self._life) if self._newest else ()
        try:
            signs = self._meeting.beats(group).values()
        except OSError:
            # Its own sign must not depend on others' files.
            return ()
        return tuple(msgspec.structs.replace(sign, told=()) for sign in signs)

    def _leading_sign(self) -> Beat | None:
        """Returns the sign of the agent that leads; None if this one does.

        Agents of the newest round lead before others, in the order of the round. The agent that
        would lead next hears of this one already.
        """
        members = self._newest.members if self._newest else ()
        leader = None
        for host in itertools.chain((one.host for one in members), self._others(members)):
            if host == self._host.name:
                break
            beat = self._sightings.look(host, is_glance=leader is not None)
            if leader is not None:
                break
            if beat is not None and not beat.is_leaving and not self._sightings.is_lost(host):
                leader = beat
        return leader

    def _others(self, members: Sequence[Member]) -> Iterator[str]:
        """Yields the other hosts. They are listed only if no host of the round leads."""
        known = {member.host for member in members}
        yield from (host for host in self._meeting.hosts() if host not in known)

    def _follow(self, record: Record | None) -> None:
        """Does what a new record says about this host."""
        if record is None or (self._newest and record.number <= self._newest.number):
            return
        self._newest = record
        self._leader.notice(record)
        self._kill_worker()
        if record.code is not None:
            self._code = record.code
            if self._leads and record.code:
                self._say(f"The job ends: {record.reason}")
            self._meeting.remove_beat(self._host.name)
            return
        index = record.index_of(self._host.name, self._life)
        if index is None or self._leaving is not None:
            return
        assignment = Assignment(index, len(record.members), record.coordinator, record.mesh)
        self._next = record, assignment, self._prepare(record, index)
        self._wake.set()

    def _prepare(self, record: Record, index: int) -> Preparation:
        """Begins to fetch what this host's worker needs of the round's snapshot, if there is one.

        That is its own part if as many workers took the snapshot, and otherwise all parts.
        """
        snapshot, holders = record.snapshot, {}
        if snapshot is not None:
            is_alike = snapshot.count == len(record.members)
            parts = [snapshot.of(index)] if is_alike else snapshot.all
            holders = {part: [] for part in parts}
            if not set(parts).issubset(self._keeper.parts()):
                for beat in self._meeting.beats(self._meeting.hosts()).values():
                    for part in set(parts).intersection(beat.parts):
                        holders[part].append((beat.address, beat.keeper_port))
            else:
                own = self._host.address, self._keeper.port
                holders = {part: [own] for part in parts}
        return Preparation(self._keeper, holders, self._wake.set)

    def _keep_parts(self) -> None:
        """Keeps copies of the newest parts of the hosts whose partner this one is in the round.

        Deletes parts that nobody needs any more.
        """
        record = self._newest
        index = record.index_of(self._host.name, self._life) if record else None
        if record is None or index is None:
            return
        self._keeper.drop_before(record.number, index)
        if self._preparation and self._worker and self._worker.report.step is not None:
            # All workers have read what they restore when one has taken a step.
            self._preparation.give_back()
            self._preparation = None
        for distance in record.distances:
            partner = (index - distance) % len(record.members)
            member = record.members[partner]
            beat = self._sightings.look(member.host, member.life, is_glance=True)
            if beat is not None:
                parts = [part for part in beat.parts if part.index == partner]
                self._keeper.replicate(parts, beat.address, beat.keeper_port)

    def _lead(self) -> None:
        hosts = self._meeting.hosts()
        signs = self._signs(hosts)
        seen = {host: self._sightings.look(host, beat=signs.get(host)) for host in hosts}
        beats = {host: beat for host, beat in seen.items() if beat is not None}
        if self._newest is not None:
            for line in self._stragglers.found(self._newest, beats):
                self._say(line)
        record = self._leader.next_record(self._newest, beats)
        if record is not None:
            agreed = self._meeting.agree(record)
            if agreed is not None:
                if agreed == msgspec.structs.replace(record, number=agreed.number):
                    self._announce(record)
                self._follow(agreed)
        elif self._worker and self._newest and self._leader.should_grow(self._newest, beats):
            # All workers save together when one is asked to.
            if self._worker.stop():
                self._say("More hosts are there: the workers save and start again")

    def _signs(self, hosts: Sequence[str]) -> dict[str, Beat]:
        """Returns host -> sign. In a large round, most are told in the signs of a few."""
        told_hosts = self._newest.told_hosts if self._newest else set()
        signs = self._meeting.beats(host for host in hosts if host not in told_hosts)
        told = {beat.host: beat for sign in signs.values() for beat in sign.told}
        stale = [h for h in told_hosts if h not in told or self._sightings.is_stale(h)]
        return {**told, **signs, **self._meeting.beats(stale)}

    def _announce(self, record: Record) -> None:
        if record.code is not None:
            return
        hosts = ", ".join(member.host for member in record.members)
        why = f" after {record.failure}" if record.failure else ""
        mesh = f", mesh {record.mesh}" if record.mesh else ""
        self._say(f"Round {record.number}{why}: {hosts}{mesh}")

    def _end_worker_out_of_reach(self) -> None:
        """Ends the worker, since the others go on without this host. Called in a thread."""
        worker = self._worker
        if worker:
            self._say(
                f"Warning: the meeting place cannot be reached{self._problem}; the worker is ended"
            )
            worker.kill("its agent cannot reach the meeting place")

    def _kill_worker(self) -> None:
        self._next = None
        if self._worker:
            self._worker.kill()
            self._worker.close()
            self._worker = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
