"""Rates of a topology, from the planner's roofline estimates."""

from __future__ import annotations

import functools

from lingvo_gshard.hlo.operations import Collective, Operation
from lingvo_gshard.planning import roofline
from lingvo_gshard.planning.machines import efficiencies, interconnect
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.planning.search.costs.rates import Rates
from lingvo_gshard.sharding.mesh import Mesh

_DTYPES = ("float32", "bfloat16", "float16")
# FLOPs of a matrix product that reaches the highest measured efficiency.
_LARGE = 1e13


def rates_of(topology: Topology) -> Rates:
    """Returns the estimated rates of one device of a topology."""
    chip = topology.chip
    share = efficiencies.matmul_efficiency(chip, _LARGE).value

    @functools.cache
    def collective_seconds(kind: str, bytes: int, axes: tuple[str, ...], mesh: Mesh) -> float:
        size = mesh.parts(axes)
        slices = interconnect.spanned_slices(axes, topology, mesh)
        call = Collective(kind, axes, size, "float32", bytes, slices=slices)
        operation = Operation("searched", kind, "", "other", collective=call)
        (timed,) = roofline.time_operations([operation], topology, mesh)
        return timed.seconds

    return Rates(
        flops_per_second={dtype: share * chip.peak(dtype) for dtype in _DTYPES},
        bytes_per_second=efficiencies.memory_efficiency(chip).value * chip.memory_bandwidth,
        capacity=chip.usable_bytes,
        collective_seconds=collective_seconds,
    )
