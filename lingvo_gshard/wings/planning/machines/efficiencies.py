"""Efficiencies of operations relative to their bounds, from published microbenchmarks.

No efficiency is fitted to the speed of a training run. Where nothing is published for a chip or an
operation, the most similar measurement is used, and its source says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.core import objects
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo.operations import Collective, FusedAttention
from lingvo_gshard.wings.planning.machines import interconnect, topologies
from lingvo_gshard.wings.planning.machines.chips import FP4, FP8, Chip, rate_of

_MEGABLOCKS = (
    "Gale et al., MegaBlocks, 2022, https://arxiv.org/abs/2211.15841, figure 9: products of "
    "blocks of experts on an A100, relative to cuBLAS"
)
_VOLTAGE = "AI @ Georgia Tech, Voltage Park benchmarks, https://github.com/aigatech/vpbenchmarking"


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """A measured rate as a share of its bound, between 0 and 1, and where it is published."""

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """The measured seconds of one collective over groups of some devices of a topology.

    `kind` is HLO's opcode. `bytes` is the size of one device's operand or result, the larger one.
    """

    topology: str
    kind: str
    devices: int
    bytes: float
    seconds: float
    source: str

    @functools.cached_property
    def efficiency(self) -> float:
        """The bound on the time, over the measured time."""
        collective = Collective(self.kind, ("all",), self.devices, "float32", 1)
        topology = topologies.get(self.topology)
        mesh = Mesh((("rest", topology.devices // self.devices), ("all", self.devices)))
        bound = self.bytes * interconnect.seconds_bound(collective, topology, mesh)
        return bound / self.seconds


_STATED = objects.table_beside(__file__, "measured.toml", dict[str, Any])
_MIB = 2**20


def _points_of(stated: Mapping[str, Any]) -> Iterator[MeasuredCollective]:
    """Yields the measurements of a set in measured.toml, which says what its fields mean."""
    source = _STATED["sources"][stated["source"]]
    sizes = [mib * _MIB for mib in stated["mib"]]
    for unit in ("microseconds", "bus"):
        for kind, by_devices in stated.get(unit, {}).items():
            for count, values in by_devices.items():
                topology, devices = stated["topology"], int(count)
                topology = topology[count] if isinstance(topology, dict) else topology
                sent = (2 if kind == "all-reduce" else 1) * (devices - 1) / devices
                for size, value in zip(sizes, values, strict=True):
                    seconds = value * 1e-6 if unit == "microseconds" else sent * size / value
                    yield MeasuredCollective(topology, kind, devices, size, seconds, source)


# The sets of measured.toml by their names.
MEASURED = {name: tuple(_points_of(stated)) for name, stated in _STATED["sets"].items()}

# With this many updates for each peer in place of one, the kernel of a step's ragged exchanges was
# so many times as fast.
_UPDATES, _FASTER = 32, 17.8
_UPDATES_ON_GB200 = (
    "EP16 on 16 GB200, 2026-08-10, https://github.com/marin-community/marin/issues/8077"
)

# Numbers of hosts -> the measured all-to-all between them.
PAIRS = {hosts: MEASURED[f"pairs_of_{hosts}_hosts"][0] for hosts in (2, 8)}
_TWO_HOSTS, HOSTS = MEASURED["two_hosts"], MEASURED["four_hosts"]
# All-reduces over four hosts stand for larger buffers over two.
_LARGEST = max(point.bytes for point in _TWO_HOSTS)
FEW_HOSTS = (*_TWO_HOSTS, *(point for point in HOSTS if point.bytes > _LARGEST))
# Numbers of hosts -> the measurements that stand for them.
_BY_HOSTS = {4: FEW_HOSTS, 16: HOSTS}
_HOSTS_SOURCE = f"{_TWO_HOSTS[0].source}; {HOSTS[0].source}"
_PAIRS_SOURCE = "; ".join(point.source for point in PAIRS.values())

# Values of `Chip.measured_links` -> the measurements.
_BY_LINKS = {
    links: [point for name in names for point in MEASURED[name]]
    for links, names in _STATED["links"].items()
}

# Of all collectives between TPU slices, and of those within that nobody has measured.
UNPUBLISHED = Efficiency(1.0, "nothing is published: the bound holds")

# Collectives -> collectives with measurements to take in their place, the most similar first.
_SIMILAR_KINDS = {
    "ragged-all-to-all": ("ragged-all-to-all", "all-to-all"),
    "reduce-scatter": ("reduce-scatter", "all-gather", "all-reduce"),
    "collective-broadcast": ("all-gather", "all-reduce"),
    "collective-permute": ("all-gather", "all-reduce"),
    "all-gather": ("all-gather", "all-reduce"),
    "all-reduce": ("all-reduce", "all-gather"),
    "all-to-all": ("all-to-all",),
}

_MEMORY = {
    "tpu": Efficiency(
        0.867, _VOLTAGE + ": copies in an H100's HBM; nothing is published for the HBM of TPUs"
    ),
    "gpu": Efficiency(0.867, _VOLTAGE + ": copies in an H100's HBM, 2,903 of 3,350 GB/s"),
    "cpu": Efficiency(0.793, _VOLTAGE + ": STREAM triad, 486.7 of 614 GB/s"),
}


def matmul_efficiency(chip: Chip, flops: float, dtype: str = "bf16") -> Efficiency:
    """Returns the share of the peak rate that a matrix product of a type reaches."""
    sizes = [(2 * n**3, share) for n, share in chip.product_efficiency.items()]
    rate = rate_of(dtype)
    if rate in (FP8, FP4) and chip.fp8_efficiency is not None:
        # A product that takes as long in bfloat16 has half or a quarter as many FLOPs. Nothing is
        # published for FP4.
        flops /= 2 if rate == FP8 else 4
        share = _interpolate(sizes, flops) / max(chip.product_efficiency.values())
        return Efficiency(share * chip.fp8_efficiency, chip.sources["fp8_efficiency"])
    return Efficiency(_interpolate(sizes, flops), chip.sources["product_efficiency"])


def attention_efficiency(chip: Chip, attention: FusedAttention, flops: float) -> Efficiency:
    """Returns the share of the peak rate that a fused attention reaches."""
    if chip.kind != "gpu":
        products = matmul_efficiency(chip, flops)
        source = f"nothing is published for fused attention: products, {products.source}"
        if not chip.matrix_unit:
            return Efficiency(products.value, source)
        # Each product of an attention has the size of a head as a dimension.
        filled = attention.head_dim / math.ceil(attention.head_dim / chip.matrix_unit)
        source += f"; heads fill a part of the matrix unit, {chip.sources['matrix_unit']}"
        return Efficiency(products.value * filled / chip.matrix_unit, source)
    stated = _STATED["attention"]
    rates = stated["gradient" if attention.is_gradient else "forward"]
    rates = rates["cudnn" if attention.is_cudnn else "kernel"]
    shares = [(n, rate / stated["peak"]) for n, rate in zip(stated["keys"], rates, strict=True)]
    return Efficiency(_interpolate(shares, attention.keys), stated["source"])


# The mean over problems of products of experts in blocks, relative to cuBLAS' batched products.
_GROUPED_SHARE = 0.986


def grouped_efficiency(chip: Chip, flops: float, dtype: str = "bf16") -> Efficiency:
    """Returns the share of the peak rate that a kernel of grouped products reaches."""
    products = matmul_efficiency(chip, flops, dtype)
    if chip.kind != "gpu":
        source = f"nothing is published for grouped products: products, {products.source}"
        return Efficiency(products.value, source)
    source = f"{_MEGABLOCKS}, of products, {products.source}"
    return Efficiency(_GROUPED_SHARE * products.value, source)


def memory_efficiency(chip: Chip) -> Efficiency:
    """Returns the share of the memory bandwidth that large operations reach."""
    return _MEMORY[chip.kind]


def collective_efficiency(kind: str, size: float, devices: int, chip: Chip) -> Efficiency:
    """Returns the efficiency of a collective relative to interconnect.seconds_bound.

    Between measurements it is interpolated over the logarithms of bytes and devices. Outside their
    range, the nearest measurement holds.

    Args:
      size: bytes of one device's operand or result, whichever is larger.
    """
    points = _points(kind, chip)
    if not points:
        return UNPUBLISHED
    by_devices: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        by_devices.setdefault(point.devices, []).append((point.bytes, point.efficiency))
    levels = [(n, _interpolate(level, size)) for n, level in by_devices.items()]
    return Efficiency(_interpolate(levels, devices), points[0].source)


def of_updates(one: Efficiency, updates: int, whole: Efficiency) -> Efficiency:
    """Returns the efficiency of a ragged exchange of GPUs of a host that sends several updates.

    Between one update and 32 it is interpolated over logarithms. More are not faster.

    Args:
      one: the efficiency with one update for each device.
      whole: the efficiency of an all-to-all, which no exchange exceeds.
    """
    share = min(math.log(max(updates, 1)) / math.log(_UPDATES), 1.0)
    value = min(one.value * _FASTER**share, whole.value)
    return Efficiency(max(value, one.value), f"{one.source}; {_UPDATES_ON_GB200}")


def network_efficiency(kind: str, size: float, hosts: int) -> Efficiency:
    """Returns the efficiency of a collective between hosts of GPUs: its bound over its time.

    Args:
      size: bytes through the network adapter of one GPU, in one direction.
      hosts: number of hosts of a group.
    """
    levels = [(n, _interpolate(_hosts_points(n), size)) for n in _BY_HOSTS]
    found = Efficiency(_interpolate(levels, hosts), _HOSTS_SOURCE)
    if kind not in ("all-to-all", "ragged-all-to-all"):
        return found
    # The measured all-to-alls are small. Large ones reach the rate of large all-reduces.
    pairs = _interpolate([(n, point.efficiency) for n, point in PAIRS.items()], hosts)
    if pairs < found.value:
        return found
    return Efficiency(pairs, _PAIRS_SOURCE)


@functools.cache
def _hosts_points(hosts: int) -> list[tuple[float, float]]:
    """Returns (bytes through the adapter of one GPU, efficiency) for each measurement."""
    points = []
    for point in _BY_HOSTS[hosts]:
        rate = topologies.get(point.topology).chip.network_bandwidth
        assert rate
        points.append((point.efficiency * point.seconds * rate, point.efficiency))
    return points


def _points(kind: str, chip: Chip) -> list[MeasuredCollective]:
    """The measurements that stand for a collective on a chip."""
    if not chip.measured_links:
        return []
    measured = _BY_LINKS[chip.measured_links]
    if chip.kind == "tpu" and kind in ("all-to-all", "ragged-all-to-all"):
        # Nothing is published for later TPUs.
        measured = _BY_LINKS["v3"]
    for similar in _SIMILAR_KINDS.get(kind, ("all-reduce", "all-gather")):
        found = [point for point in measured if point.kind == similar]
        if found:
            return found
    return []


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolates (x, y) points linearly over log x; beyond them, the outermost y holds."""
    xs, ys = zip(*sorted(points), strict=True)
    return float(np.interp(math.log(max(at, xs[0])), np.log(xs), ys))
