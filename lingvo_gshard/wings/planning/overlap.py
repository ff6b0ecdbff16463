"""Overlap: the communication of a compiled step that the schedule hides behind computation.

An operation hides a collective if it runs while the collective moves data
(wings/hlo/asynchronous.py). It hides the collective for as long as the operation takes. Collectives
that share links take turns in the order of their starts, so an operation hides one of them at a
time. The exposed time of a collective is the time that no operation hides. The step waits for it.
While it waits, collectives on other links go on.

A device's collectives share its links: XLA runs the collectives of a GPU in one stream, and of a
TPU one after the other (xla_gpu_experimental_parallel_collective_overlap_limit and
xla_max_concurrent_async_all_gathers are 1 by default). With more than one stream, collectives
within a host of GPUs and those between hosts move data at the same time. The data-center network
between TPU slices has links of its own. So have copies to the host and copies from it, which are
hidden in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.planning.roofline import TimedOperation


@dataclasses.dataclass
class _Transfer:
    """A collective, or a copy between device and host, that the operation at `index` starts.

    `hidden` and `remaining` are seconds of all executions, behind other operations and exposed.
    """

    index: int
    links: str
    remaining: float
    hidden: float = 0.0


def hide(
    timed: Sequence[TimedOperation], has_own_links: Callable[[Collective], bool] = lambda _: False
) -> list[TimedOperation]:
    """Returns the operations with the time that each of their collectives hides.

    All times are sums over the executions of a step. An operation between the start and the end of
    a collective is in the same loop, or in a loop within it, so that sums hide as much as the
    executions do one by one.

    Args:
      timed: the operations of a step in the order of the schedule, with nothing hidden.
      has_own_links: whether a collective moves data while others within a host do.
    """
    transfers: dict[str, _Transfer] = {}
    under_way: list[str] = []
    for index, each in enumerate(timed):
        operation = each.operation
        flying = [transfers[name] for name in operation.in_flight]
        _wait([transfers[name] for name in under_way if name not in operation.in_flight], flying)
        under_way = [*operation.in_flight]
        links = _links(operation, has_own_links)
        if links:
            transfers[operation.name] = _Transfer(index, links, each.seconds)
            under_way.append(operation.name)
        else:
            _progress(flying, each.seconds)
    _wait([transfers[name] for name in under_way], [])
    found = list(timed)
    for each in transfers.values():
        own = found[each.index]
        exposed = max(own.seconds - each.hidden, 0.0)
        found[each.index] = dataclasses.replace(own, seconds=exposed, hidden_seconds=each.hidden)
    return found


def _wait(ended: Sequence[_Transfer], flying: Sequence[_Transfer]) -> None:
    """Waits for the rest of transfers, one after the other, while other links move data."""
    for number, each in enumerate(ended, 1):
        _progress([*ended[number:], *flying], each.remaining, busy=each.links)


def _progress(flying: Sequence[_Transfer], seconds: float, busy: str = "") -> None:
    """Moves data of transfers for some seconds, of one at a time on links that are not busy."""
    free = {busy: 0.0}
    for each in flying:
        taken = min(free.setdefault(each.links, seconds), each.remaining)
        free[each.links] -= taken
        each.remaining -= taken
        each.hidden += taken


def _links(operation: Operation, has_own_links: Callable[[Collective], bool]) -> str:
    """Returns the name of the links that an operation moves data over; "" if it moves none."""
    collective = operation.collective
    if collective is not None:
        if collective.slices > 1:
            return "between slices"
        return "between hosts" if has_own_links(collective) else "between chips"
    if operation.host is not None:
        return "to the host" if operation.host.to_host else "from the host"
    return ""
