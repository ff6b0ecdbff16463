"""Leader: decides what the agents of a job do next, from what all of them say.

Every agent has a leader, and the first agent that lives asks its own. All that a decision needs is
in the signs and in the newest record, so that another agent goes on where a lost one stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from lingvo_gshard.wings.agents.options import AgentOptions
from lingvo_gshard.wings.agents.partners import distances
from lingvo_gshard.wings.agents.records import (
    FAILED,
    LOST,
    STOP_CODES,
    STOPPED,
    UNMET,
    Beat,
    Failure,
    Member,
    Outcome,
    Past,
    Record,
)
from lingvo_gshard.wings.agents.sightings import Sightings
from lingvo_gshard.wings.agents.worker import words_of
from lingvo_gshard.wings.services.snapshot_parts import Part

_HOUR = 3600.0


class Leader:
    """Decides on records: rounds of workers, and the end of the job."""

    def __init__(
        self,
        options: AgentOptions,
        meshes: Mapping[int, str | None],
        sightings: Sightings,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepares to lead.

        Args:
          meshes: number of hosts -> mesh, for each number that can train.
          sightings: who lives.
        """
        self._options, self._meshes, self._sightings = options, meshes, sightings
        self._clock = clock
        # When this agent first saw something, such as ("round", 3), by its own clock.
        self._first_seen: dict[tuple[str, int], float] = {}

    def notice(self, record: Record) -> None:
        """Notes when a record was first seen. Every agent does, since any may have to lead."""
        self._age("round", record.number)

    def next_record(self, newest: Record | None, beats: Mapping[str, Beat]) -> Record | None:
        """Returns the next record; None while the newest one holds, or others must be waited for.

        Args:
          newest: the newest record; None if there is none.
          beats: host -> its last sign, for all hosts.
        """
        current = newest if newest and newest.code is None else None
        if current and not any(self._stays(member, beats) for member in current.members):
            # A job that starts again, with other agents.
            current = None
        failure = None
        if current:
            if all(self._runs(member, beats, current.number) for member in current.members):
                # All is well again: a later trouble is not the same one.
                self._first_seen = {k: at for k, at in self._first_seen.items() if k[0] == "round"}
                return None
            age = self._age("trouble", current.number)
            outcomes = self._outcomes(current, beats)
            still = [m for m in current.members if self._runs(m, beats, current.number)]
            if still and age < self._options.stop_seconds:
                return None
            if outcomes and all(outcome.code == 0 for outcome in outcomes.values()):
                return Record(current.number + 1, code=0, reason="all steps are done")
            failure = self._failure(current, outcomes, beats)
        number = newest.number + 1 if newest else 1
        return self._next(number, current, failure, beats)

    def should_grow(self, record: Record, beats: Mapping[str, Beat]) -> bool:
        """Returns whether the workers of a round shall save, so that more hosts can take part."""
        if self._age("round", record.number) < self._options.grow_seconds:
            return False
        hosts = self._available(record, self._past(record), beats)
        return (self._count(len(hosts)) or 0) > len(record.members)

    def failures_of(self, host: str, record: Record) -> int:
        """Returns how often a host failed within the last hour, as a record knows it."""
        return sum(one.host == host for one in self._past(record))

    def _next(
        self,
        number: int,
        current: Record | None,
        failure: Failure | None,
        beats: Mapping[str, Beat],
    ) -> Record | None:
        """Returns the next round or the end; None while more hosts may come."""
        past = self._past(current)
        if current and failure:
            if failure.is_same_as(current.failure):
                reason = f"twice in a row, the same has happened: {failure}"
                return Record(number, failure=failure, code=1, reason=reason)
            if failure.kind != STOPPED:
                past = (*past, Past("" if failure.kind == UNMET else failure.host, 0.0))
            if len(past) > self._options.max_restarts:
                reason = (
                    f"{len(past)} failures within an hour are more than "
                    f"`max_restarts={self._options.max_restarts}`; the last one: {failure}"
                )
                return Record(number, failure=failure, code=1, reason=reason)
        hosts = self._available(current, past, beats)
        waited = self._age("gathering", number)
        patience = self._options.regather_seconds if current else self._options.gather_seconds
        if len(hosts) < self._options.max_hosts and waited < patience:
            return None
        count = self._count(len(hosts))
        if count is None:
            is_over = waited > self._options.join_seconds
            return self._too_few(number, hosts, failure, beats) if is_over else None
        members = _in_place(current, hosts[:count])
        first = beats[members[0]]
        return Record(
            number,
            tuple(Member(host, beats[host].life) for host in members),
            _host_and_port(first.address, self._options.port or first.port),
            self._meshes[count],
            failure,
            past,
            self._snapshot(hosts, beats),
            distances([beats[host].rack for host in members], self._options.snapshot_copies),
        )

    def _snapshot(self, hosts: Sequence[str], beats: Mapping[str, Beat]) -> Part | None:
        """Returns the first part of the newest snapshot that the hosts have completely."""
        parts = {part for host in hosts for part in beats[host].parts}
        of_snapshot: dict[Part, set[int]] = {}
        for part in parts:
            of_snapshot.setdefault(part.first, set()).add(part.index)
        complete = [first for first, found in of_snapshot.items() if len(found) == first.count]
        return max(complete, default=None)

    def _too_few(
        self, number: int, hosts: Sequence[str], failure: Failure | None, beats: Mapping[str, Beat]
    ) -> Record:
        reason = (
            f"`min_hosts={self._options.fewest}` hosts are needed, and for "
            f"{self._options.join_seconds:g} s only {len(hosts)} were there: "
            f"{', '.join(hosts) or 'none'}"
        )
        unfit = [host for host in sorted(beats) if beats[host].is_unfit]
        if unfit:
            reason += f"; kept out by gshard-doctor: {', '.join(unfit)}"
        return Record(number, failure=failure, code=1, reason=reason)

    def _count(self, available: int) -> int | None:
        """Returns how many hosts train if some are available; None if too few are."""
        fitting = [n for n in self._meshes if self._options.fewest <= n <= available]
        return max(fitting, default=None)

    def _available(
        self, current: Record | None, past: Sequence[Past], beats: Mapping[str, Beat]
    ) -> list[str]:
        """Returns the hosts that can take part. The hosts of the last round come first.

        Hosts that failed often are left out if enough others are there.
        """
        before = [member.host for member in current.members] if current else []
        order = [*before, *sorted(set(beats) - set(before))]
        there = [h for h in order if h in beats and self._can_take_part(beats[h])]
        failures = [one.host for one in past]
        most = self._options.max_host_failures
        healthy = [host for host in there if failures.count(host) < most]
        return healthy if self._count(len(healthy)) is not None else there

    def _can_take_part(self, beat: Beat) -> bool:
        return self._sightings.lives(beat.host) and not beat.is_leaving and not beat.is_unfit

    def _is_there(self, member: Member, beats: Mapping[str, Beat]) -> bool:
        """Returns whether the agent that agreed to a round still lives, or may."""
        beat = beats.get(member.host)
        is_same = beat is not None and beat.life == member.life
        return is_same and not self._sightings.is_lost(member.host)

    def _stays(self, member: Member, beats: Mapping[str, Beat]) -> bool:
        return self._is_there(member, beats) and not beats[member.host].is_leaving

    def _runs(self, member: Member, beats: Mapping[str, Beat], number: int) -> bool:
        if not self._is_there(member, beats):
            return False
        outcome = beats[member.host].outcome
        return outcome is None or outcome.round != number

    def _outcomes(self, current: Record, beats: Mapping[str, Beat]) -> dict[str, Outcome]:
        """Returns host -> how its worker of the round ended, for those that tell."""
        return {
            member.host: outcome
            for member in current.members
            if (beat := beats.get(member.host)) and beat.life == member.life
            if (outcome := beat.outcome) and outcome.round == current.number
        }

    def _failure(
        self, current: Record, outcomes: Mapping[str, Outcome], beats: Mapping[str, Beat]
    ) -> Failure | None:
        """Returns why a round ended: the likeliest cause among all that happened."""
        stopped = [host for host, outcome in outcomes.items() if outcome.code in STOP_CODES]
        leaving = [host for host in stopped if beats[host].is_leaving]
        if len(stopped) == len(current.members) and not leaving:
            # They saved so that more hosts can take part.
            return None
        for member in current.members:
            if member.host not in outcomes and not self._is_there(member, beats):
                beat = beats.get(member.host)
                is_new = beat is not None and beat.life != member.life
                words = "lost its agent" if is_new else "gives no sign of life"
                return Failure(LOST, member.host, self._last_step(current, outcomes, beats), words)
        # A process that a signal ended made others fail, not the other way round.
        ranked = sorted(outcomes, key=lambda host: outcomes[host].code >= 0)
        for host in ranked:
            outcome = outcomes[host]
            if outcome.is_failure:
                return Failure(FAILED, host, outcome.step, words_of(outcome))
        for host in (*leaving, *stopped):
            return Failure(STOPPED, host, outcomes[host].step, "was asked to stop")
        for host in ranked:
            if outcomes[host].code:
                return Failure(UNMET, host, outcomes[host].step, words_of(outcomes[host]))
        still = next(m.host for m in current.members if m.host not in outcomes)
        last = self._last_step(current, outcomes, beats)
        return Failure(FAILED, still, last, "did not end its worker")

    def _last_step(
        self, current: Record, outcomes: Mapping[str, Outcome], beats: Mapping[str, Beat]
    ) -> int | None:
        """Returns the last step that a worker of a round has told of. All take the same steps."""
        lives = {member.host: member.life for member in current.members}
        told = [beat.step for host, beat in beats.items() if lives.get(host) == beat.life]
        told += [outcome.step for outcome in outcomes.values()]
        return max((step for step in told if step is not None), default=None)

    def _past(self, record: Record | None) -> tuple[Past, ...]:
        """Returns the failures of the last hour, as of now."""
        if record is None:
            return ()
        age = self._age("round", record.number)
        aged = (Past(one.host, one.ago + age) for one in record.past)
        return tuple(one for one in aged if one.ago < _HOUR)

    def _age(self, what: str, number: int) -> float:
        """Returns for how long this agent has seen something; 0 at the first call."""
        now = self._clock()
        return now - self._first_seen.setdefault((what, number), now)


def _in_place(current: Record | None, hosts: Sequence[str]) -> list[str]:
    """Returns hosts in order: newcomers take the places of hosts that are gone.

    The others keep theirs, and thus their parts of snapshots.
    """
    before = [member.host for member in current.members] if current else []
    if len(before) != len(hosts):
        return list(hosts)
    there, known = set(hosts), set(before)
    newcomers = iter([host for host in hosts if host not in known])
    return [host if host in there else next(newcomers) for host in before]


def _host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
