"""Roofline model of a compiled step: the time of each operation, as a bound and as an estimate.

The bound assumes the published peak rates. The estimate multiplies them by measured efficiencies
(machines/efficiencies.py). Within an operation, arithmetic, memory and links work in parallel, so
the slowest of them determines the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.planning.machines import efficiencies, interconnect
from lingvo_gshard.wings.planning.machines.efficiencies import Efficiency
from lingvo_gshard.wings.planning.machines.topologies import Topology


@dataclasses.dataclass(frozen=True)
class TimedOperation:
    """The time of all executions of an operation in one step.

    Attributes:
      compute_seconds: lower bound on its arithmetic.
      memory_seconds: lower bound on its memory traffic.
      communication_seconds: lower bound on its communication.
      seconds_bound: the largest of the bounds.
      seconds: the estimate of what the operation adds to the step: of a collective, the time that
        no computation hides.
      hidden_seconds: the estimate of the time of its collective, or of its transfer to or from the
        host, that computation hides (wings/planning/overlap.py).
      host_seconds: lower bound on its transfer to or from the host.
    """

    operation: Operation
    compute_seconds: float
    memory_seconds: float
    communication_seconds: float
    seconds_bound: float
    seconds: float
    hidden_seconds: float = 0.0
    host_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Attributes:
      seconds_bound: lower bound on the step. All communication overlaps with the other
        operations, which run one after the other.
      seconds: the estimate. Operations run one after the other. Of a collective counts the time
        that no computation hides.
    """

    seconds_bound: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Budget:
    """The cost of training on a number of tokens.

    Attributes:
      kilowatt_hours: energy of the chips alone; None if their power is not published.
      price: in `currency`; None if no price is published.
      currency: ISO code; None if no price is published.
    """

    tokens: float
    chip_hours: float
    kilowatt_hours: float | None
    price: float | None
    currency: str | None
    sources: tuple[str, ...]


def time_operations(
    operations: Iterable[Operation], topology: Topology, mesh: Mesh
) -> list[TimedOperation]:
    """Returns the time of each operation, in order. No communication is hidden yet."""
    mesh.check_devices(topology.devices)
    return [_timed(operation, topology, mesh) for operation in operations]


def step_time(timed: Sequence[TimedOperation]) -> StepTime:
    """Returns the time of the step that consists of these operations."""
    communication = sum(operation.communication_seconds for operation in timed)
    others = sum(
        max(operation.compute_seconds, operation.memory_seconds)
        for operation in timed
        if operation.operation.collective is None and operation.operation.host is None
    )
    bound = max(others, communication, *_host_seconds(timed))
    return StepTime(
        seconds_bound=bound,
        # The bound has one link for all collectives. Those of a step on several slices have two.
        seconds=max(bound, sum(operation.seconds for operation in timed)),
    )


def _host_seconds(timed: Sequence[TimedOperation]) -> list[float]:
    """Returns the bounds of all transfers to the host, and of all from it."""
    pairs = [(each.operation.host, each.host_seconds) for each in timed]
    return [
        sum(seconds for host, seconds in pairs if host and host.to_host is to_host)
        for to_host in (True, False)
    ]


def budget(tokens: float, seconds_per_token: float, topology: Topology) -> Budget:
    """Returns the cost of training on a number of tokens on all chips of a topology."""
    chip = topology.chip
    hours = tokens * seconds_per_token * topology.chips / 3600
    return Budget(
        tokens=tokens,
        chip_hours=hours,
        kilowatt_hours=None if chip.watts is None else hours * chip.watts / 1000,
        price=None if chip.price is None else hours * chip.price.amount,
        currency=None if chip.price is None else chip.price.currency,
        sources=tuple(
            chip.sources[field] for field in ("watts", "price") if getattr(chip, field) is not None
        ),
    )


def utilization(useful_flops: float, seconds: float, topology: Topology) -> float:
    """Returns the model FLOPs utilization (MFU) of one device.

    It is relative to the peak in bfloat16, or in float32 on a CPU (Chowdhery et al. 2022, PaLM,
    appendix B, https://arxiv.org/abs/2204.02311).

    Args:
      useful_flops: FLOPs of the model on one device, without recomputation and dispatch.
    """
    peak = topology.chip.peak("float32" if topology.kind == "cpu" else "bfloat16")
    return useful_flops / (seconds * peak)


def _timed(operation: Operation, topology: Topology, mesh: Mesh) -> TimedOperation:
    chip = topology.chip
    matmul = operation.matmul_flops / chip.peak(operation.dtype, operation.passes)
    vector = operation.other_flops / chip.vector_flops if chip.vector_flops else 0.0
    memory = operation.bytes / chip.memory_bandwidth
    flops = operation.matmul_flops
    if operation.attention is not None:
        efficiency = efficiencies.attention_efficiency(chip, operation.attention, flops)
    elif operation.is_grouped:
        efficiency = efficiencies.grouped_efficiency(chip, flops, operation.dtype)
    else:
        efficiency = efficiencies.matmul_efficiency(chip, flops, operation.dtype)
    estimates = [
        matmul / efficiency.value,
        vector,
        memory / efficiencies.memory_efficiency(chip).value,
    ]
    communication = 0.0
    collective = operation.collective
    if collective is not None:
        communication = interconnect.seconds_bound(collective, topology, mesh)
        share = _collective_efficiency(collective, communication, topology, mesh)
        latency = interconnect.seconds_latency(collective, topology, mesh)
        formula = interconnect.seconds_by_formula(collective, topology, mesh)
        if topology.kind == "gpu":
            # The measured efficiencies, of large collectives, include the latency.
            estimates.append(max(formula / share.value, formula + latency))
            estimates.append(_seconds_within_hosts(collective, topology, mesh))
        else:
            estimates.append(formula / share.value + latency)
    host = 0.0
    if operation.host is not None and chip.host_bandwidth is not None:
        host = operation.host.bytes / chip.host_bandwidth
    estimates.append(host)
    bounds = [max(matmul, vector), memory, communication, host]
    compute, memory, communication, host = (operation.times * seconds for seconds in bounds)
    return TimedOperation(
        operation,
        compute,
        memory,
        communication,
        max(compute, memory, communication, host),
        operation.times * max(estimates),
        host_seconds=host,
    )


# Collectives between hosts were measured on hosts of so many GPUs, and include their links.
_MEASURED_HOST = 8


def _seconds_within_hosts(collective: Collective, topology: Topology, mesh: Mesh) -> float:
    """Returns the time of a collective between racks through the links of each; else 0."""
    hosts = interconnect.spanned_hosts(collective, topology, mesh)
    members = collective.group_size // hosts
    pairs = collective.kind in ("all-to-all", "ragged-all-to-all", "collective-permute")
    if hosts == 1 or members <= _MEASURED_HOST or pairs:
        return 0.0
    bound = interconnect.seconds_within_hosts(collective, topology.chip)
    share = efficiencies.collective_efficiency(
        collective.kind, collective.bytes, members, topology.chip
    )
    return bound / share.value


def _collective_efficiency(
    collective: Collective, seconds_bound: float, topology: Topology, mesh: Mesh
) -> Efficiency:
    """Returns the measured efficiency of a collective on the links that its groups span."""
    chip = topology.chip
    if collective.slices > 1:
        return efficiencies.UNPUBLISHED
    hosts = interconnect.spanned_hosts(collective, topology, mesh)
    if chip.network_bandwidth and hosts > 1:
        size = seconds_bound * chip.network_bandwidth
        return efficiencies.network_efficiency(collective.kind, size, hosts)
    found = efficiencies.collective_efficiency(
        collective.kind, collective.bytes, collective.group_size, chip
    )
    if chip.kind == "gpu" and collective.kind == "ragged-all-to-all":
        whole = efficiencies.collective_efficiency(
            "all-to-all", collective.bytes, collective.group_size, chip
        )
        return efficiencies.of_updates(found, collective.updates, whole)
    return found
