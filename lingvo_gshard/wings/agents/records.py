"""Messages of agents: signs of life, and numbered records of decisions."""

from __future__ import annotations

import functools
import math

import msgspec

from lingvo_gshard.core import EXIT_CODES
from lingvo_gshard.wings.services.snapshot_parts import Part

# Exit codes of workers that were asked to stop.
STOP_CODES = frozenset(EXIT_CODES.values())
# Kinds of `Failure`. UNMET: every worker blames another one, so that the network is the reason.
FAILED, LOST, STOPPED, UNMET = "failed", "lost", "stopped", "unmet"


class Outcome(msgspec.Struct, frozen=True):
    """The end of one worker.

    Attributes:
      round: number of the record that the worker was started for.
      code: its exit code; negative for a signal, as in `subprocess`.
      step: the last step that it finished; None if it finished none.
      problem: the reason that the worker reported; "" if it reported none.
      is_consequence: whether it ended because another worker did.
    """

    round: int
    code: int
    step: int | None = None
    problem: str = ""
    is_consequence: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether it failed by itself, and was neither asked to stop nor ended by another one."""
        return self.code != 0 and self.code not in STOP_CODES and not self.is_consequence


class Beat(msgspec.Struct, frozen=True):
    """An agent's sign of life. Each agent rewrites its own, and nobody else does.

    Attributes:
      life: random; differs between two agents that ran on the host one after another.
      count: number of the sign, so that any two differ.
      address: where other hosts reach this one.
      port: a port that is free on this host.
      is_leaving: whether the host was asked to stop, and will not take part again.
      outcome: how the last worker ended; None if none has ended.
      newest: number of the newest record that this agent knows, if it leads. A directory on a
        network may show a new file late, but an open of a named file finds it.
      step: the last step that the worker finished.
      input_seconds: median wait of the worker for a batch.
      probe_seconds: time of a fixed computation on the slowest device of the host.
      parts: the parts of snapshots that the host has, in order.
      keeper_port: where the host serves them.
      is_unfit: whether the host is being checked after failures, or has failed the check.
      heard: life of other agents -> count of their newest sign that this agent has read, which
        proves to them that this sign is newer than theirs.
      rack: what fails together with the host; "" if it is not known.
      told: signs of other hosts that this one has read for the agent that leads.
    """

    host: str
    life: str
    count: int
    address: str
    port: int
    is_leaving: bool = False
    outcome: Outcome | None = None
    newest: int = 0
    step: int | None = None
    input_seconds: float | None = None
    probe_seconds: float | None = None
    parts: tuple[Part, ...] = ()
    keeper_port: int = 0
    is_unfit: bool = False
    heard: dict[str, int] = {}
    rack: str = ""
    told: tuple[Beat, ...] = ()


class Member(msgspec.Struct, frozen=True):
    """A host that takes part in a round.

    Attributes:
      life: the agent that agreed to take part.
    """

    host: str
    life: str


class Failure(msgspec.Struct, frozen=True):
    """Why a round ended early.

    Attributes:
      kind: FAILED, LOST, STOPPED or UNMET.
      host: the host that it began with; for UNMET any host.
      step: the last step that the host's worker finished; of a host that cannot tell, the last one
        that any worker of its round did. None if none did.
      words: what happened, as a verb phrase about the host.
    """

    kind: str
    host: str
    step: int | None
    words: str

    def __str__(self) -> str:
        step = "before the round's first step" if self.step is None else f"after step {self.step:,}"
        return f"{self.host} {self.words} ({step})"

    def is_same_as(self, other: Failure | None) -> bool:
        """Returns whether two rounds in a row failed alike, so that a third would, too.

        A worker that a signal ended before its first step says nothing about its next one.
        """
        if other is None or self.kind != FAILED or other.kind != FAILED:
            return False
        is_known = self.step is not None or not self.words.startswith(KILLED)
        return is_known and (self.step, self.words) == (other.step, other.words)


# Fewer signs are read at once anyway.
_LARGE = 64
# Begins the words on a worker that a signal ended.
KILLED = "was killed by"


class Past(msgspec.Struct, frozen=True):
    """A failure of the last hour.

    Attributes:
      host: the host that it began with; "" if no host is to blame.
      ago: seconds between the failure and the record, so that no two clocks are compared.
    """

    host: str
    ago: float


class Record(msgspec.Struct, frozen=True, dict=True):
    """A decision of the agents: a round of workers, or the end of the job.

    Records are numbered, and each number is written once.

    Attributes:
      number: its number, from 1.
      members: the hosts of the round, in the order of their workers.
      coordinator: host:port where the workers meet.
      mesh: the mesh of the round; None leaves it as the command has it.
      failure: why the round before ended; None for the first.
      past: the failures of the last hour, and of those hosts.
      snapshot: the first part of the snapshot that the workers restore if no checkpoint is newer;
        None if no snapshot is complete.
      distances: numbers of places after a member, to the members that copy its parts.
      code: the exit code of the whole job; None while it goes on.
      reason: why the job ends.
    """

    number: int
    members: tuple[Member, ...] = ()
    coordinator: str = ""
    mesh: str | None = None
    failure: Failure | None = None
    past: tuple[Past, ...] = ()
    snapshot: Part | None = None
    distances: tuple[int, ...] = ()
    code: int | None = None
    reason: str = ""

    def index_of(self, host: str, life: str) -> int | None:
        """Returns the number of a host's worker; None if it has none in this round."""
        return self._indices.get(Member(host, life))

    @functools.cached_property
    def _indices(self) -> dict[Member, int]:
        return {member: k for k, member in enumerate(self.members)}

    def group_of(self, host: str, life: str) -> tuple[str, ...]:
        """Returns the hosts whose signs a host reads for the agent that leads; () for most.

        In a large round, the first of every so many hosts does, so that the agent that leads reads
        few files.
        """
        index = self.index_of(host, life)
        size = self._group_size
        if index is None or size == 1 or index % size:
            return ()
        return tuple(member.host for member in self.members[index + 1 : index + size])

    @functools.cached_property
    def told_hosts(self) -> set[str]:
        """The hosts whose signs others read for the agent that leads."""
        size = self._group_size
        return {member.host for k, member in enumerate(self.members) if k % size}

    @property
    def _group_size(self) -> int:
        count = len(self.members)
        return math.isqrt(count) if count >= _LARGE else 1

    def has_lost(self, host: str, life: str) -> bool:
        """Returns whether an earlier agent of a host is in this round, which it did not end."""
        return any(one.host == host and one.life != life for one in self.members)
