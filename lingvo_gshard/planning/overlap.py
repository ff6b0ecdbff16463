"""Overlap: the communication of a compiled step that the schedule hides behind computation.

An operation hides a collective if it runs while the collective moves data (hlo/asynchronous.py).
It hides the collective for as long as the operation takes. Collectives that share links take turns
in the order of their starts, so an operation hides one of them at a time. The exposed time of a
collective is the time that no operation hides. The step waits for it.

A device's collectives share its links: XLA runs the collectives of a GPU in one stream, and of a
TPU one after the other (xla_gpu_experimental_parallel_collective_overlap_limit and
xla_max_concurrent_async_all_gathers are 1 by default). The data-center network between TPU slices
has links of its own. So have copies to the host and copies from it, which are hidden in the same
way.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from lingvo_gshard.hlo.operations import Operation
from lingvo_gshard.planning.roofline import TimedOperation


@dataclasses.dataclass
class _Transfer:
    """A collective, or a copy between device and host, that was started.

    Attributes:
      index: position of the operation that starts it.
      links: the links that it uses.
      remaining: seconds of it that are not hidden, of all executions.
    """

    index: int
    links: str
    remaining: float


def hide(timed: Sequence[TimedOperation]) -> list[TimedOperation]:
    """Returns the operations with the time that each of their collectives hides.

    All times are sums over the executions of a step. An operation between the start and the end of
    a collective is in the same loop, or in a loop within it, so that sums hide as much as the
    executions do one by one.

    Args:
      timed: the operations of a step in the order of the schedule, with nothing hidden.
    """
    transfers: dict[str, _Transfer] = {}
    hidden: collections.defaultdict[int, float] = collections.defaultdict(float)
    for index, each in enumerate(timed):
        operation = each.operation
        links = _links(operation)
        if links:
            transfers[operation.name] = _Transfer(index, links, each.seconds)
            continue
        free: dict[str, float] = {}
        for name in operation.in_flight:
            transfer = transfers[name]
            room = free.setdefault(transfer.links, each.seconds)
            taken = min(room, transfer.remaining)
            free[transfer.links] -= taken
            transfer.remaining -= taken
            hidden[transfer.index] += taken
    return [_hidden(each, hidden[index]) for index, each in enumerate(timed)]


def _hidden(timed: TimedOperation, seconds: float) -> TimedOperation:
    if not seconds:
        return timed
    exposed = max(timed.seconds - seconds, 0.0)
    return dataclasses.replace(timed, seconds=exposed, hidden_seconds=seconds)


def _links(operation: Operation) -> str:
    """Returns the name of the links that an operation moves data over; "" if it moves none."""
    if operation.collective is not None:
        return "between slices" if operation.collective.slices > 1 else "between chips"
    if operation.host is not None:
        return "to the host" if operation.host.to_host else "from the host"
    return ""
