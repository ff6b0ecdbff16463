"""Seconds of a compiled step's operations: a bound from specifications, and an estimate.

The bound takes the published peak rates, the estimate the share of them that was measured
(efficiencies.py). Within an operation, arithmetic, memory and links work at the same time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from lingvo_gshard.hlo.operation import Operation
from lingvo_gshard.planning.machines import efficiencies, interconnect
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class TimedOperation:
    """Seconds of all executions of an operation in a step.

    compute_seconds, memory_seconds, communication_seconds: bounds of its parts.
    seconds_bound: the longest of them. seconds: the estimate.
    """

    operation: Operation
    compute_seconds: float
    memory_seconds: float
    communication_seconds: float
    seconds_bound: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    compute_seconds, memory_seconds, communication_seconds: sums of the operations' bounds.
    seconds_bound: operations run one after another, and all collectives beside the others.
    seconds: the estimate; collectives, too, run one after another, none of them beside another
        operation.
    """

    compute_seconds: float
    memory_seconds: float
    communication_seconds: float
    seconds_bound: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a number of tokens takes; price and energy are None where none is published.

    kilowatt_hours: of the chips alone. sources: of the power and the price.
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
    """Returns seconds of each operation, in order; ValueError if the mesh has another size."""
    mesh.check_devices(topology.devices)
    return [_timed(operation, topology, mesh) for operation in operations]


def step_time(timed: Sequence[TimedOperation]) -> StepTime:
    """Returns seconds of the step that operations make up."""
    communication = sum(operation.communication_seconds for operation in timed)
    others = sum(
        max(operation.compute_seconds, operation.memory_seconds)
        for operation in timed
        if operation.operation.collective is None
    )
    return StepTime(
        compute_seconds=sum(operation.compute_seconds for operation in timed),
        memory_seconds=sum(operation.memory_seconds for operation in timed),
        communication_seconds=communication,
        seconds_bound=max(others, communication),
        seconds=sum(operation.seconds for operation in timed),
    )


def budget(tokens: float, seconds_per_token: float, topology: Topology) -> Budget:
    """Returns what training on a number of tokens takes, all chips of a topology together."""
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
    """Returns the model's FLOPs over those of the peak in the same time ("MFU"), of one device.

    The peak is that of bfloat16, of a CPU that of float32 (Chowdhery et al. 2022, PaLM, appendix
    B, https://arxiv.org/abs/2204.02311).
    """
    peak = topology.chip.peak("float32" if topology.kind == "cpu" else "bfloat16")
    return useful_flops / (seconds * peak)


def _timed(operation: Operation, topology: Topology, mesh: Mesh) -> TimedOperation:
    chip = topology.chip
    matmul = operation.matmul_flops / chip.peak(operation.dtype, operation.passes)
    vector = operation.other_flops / chip.vector_flops if chip.vector_flops else 0.0
    memory = operation.bytes / chip.memory_bandwidth
    matmul_share = efficiencies.matmul_efficiency(chip, operation.matmul_flops).value
    estimates = [
        matmul / matmul_share,
        vector,
        memory / efficiencies.memory_efficiency(chip).value,
    ]
    communication = 0.0
    call = operation.collective
    if call is not None:
        communication = interconnect.seconds_bound(call, topology, mesh)
        share = efficiencies.collective_efficiency(call.kind, call.bytes, call.group_size, chip)
        latency = interconnect.seconds_latency(call, topology, mesh)
        formula = interconnect.seconds_by_formula(call, topology, mesh)
        estimates.append(formula / share.value + latency)
    bounds = [max(matmul, vector), memory, communication]
    compute, memory, communication = (operation.times * seconds for seconds in bounds)
    return TimedOperation(
        operation,
        compute,
        memory,
        communication,
        max(compute, memory, communication),
        operation.times * max(estimates),
    )
