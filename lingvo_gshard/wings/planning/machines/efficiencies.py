"""Efficiencies of operations relative to their bounds, from published microbenchmarks.

No efficiency is fitted to the speed of a training run. Where nothing is published for a chip or an
operation, the most similar measurement is used, and its source says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo.operations import Collective, FusedAttention
from lingvo_gshard.wings.planning.machines import interconnect, nccl_times, topologies
from lingvo_gshard.wings.planning.machines.chips import FP8, Chip, rate_of

_GSHARD = "Lepikhin et al., GShard, 2020, https://arxiv.org/abs/2006.16668, "
_FIGURE_9 = _GSHARD + "figure 9 (read off): collectives of TPU v3, input of each core"
_FIGURE_9_SCALING = (
    _GSHARD + "section 5: the all-to-all takes 3.75 times as long on 2,048 as on 128"
)
_IRONWOOD = "https://github.com/AI-Hypercomputer/accelerator-microbenchmarks, Ironwood/"
_BETWEEN_HOSTS = (
    "Bekman, Machine Learning Engineering, Inter-node speed depends on intra-node speed (4 hosts of"
    " 8 B200, 400 Gbit/s for each GPU), https://github.com/stas00/ml-engineering/tree/master/network"
)
_BETWEEN_TWO_HOSTS = (
    "Mysore, Nebius H100 16-GPU multi-node benchmark, 2025-12-15 (2 hosts of 8 H100, InfiniBand), "
    "https://github.com/drmysore/nebius-h100-16gpu-benchmark"
)
_RACK = "72 GB200 of a rack, 2025-02-20, https://github.com/coreweave/nccl-tests/pull/43"
_RAGGED_ON_B200 = (
    "lax.ragged_all_to_all on B200, 2025-10-30, https://github.com/openxla/xla/issues/33386"
)
_RAGGED_IN_SMALL_GROUPS = (
    "; steps with groups of 2, 4 and 8 GPUs grow as the bytes for each peer, "
    "https://github.com/marin-community/marin/issues/7012"
)
_PAIRS_OF_8_HOSTS = (
    "NCCL's all-to-all on 8 hosts of 8 H800, 2024-12-05, https://github.com/NVIDIA/nccl/issues/1531"
)
_FLASH_3 = (
    "Shah et al., FlashAttention-3, 2024, https://arxiv.org/abs/2407.08608, figures 5 and 6: heads "
    "of 128 on an H100"
)
_MEGABLOCKS = (
    "Gale et al., MegaBlocks, 2022, https://arxiv.org/abs/2211.15841, figure 9: products of "
    "blocks of experts on an A100, relative to cuBLAS"
)
_VOLTAGE = "AI @ Georgia Tech, Voltage Park benchmarks, https://github.com/aigatech/vpbenchmarking"

# The rates that the paper shares are of a peak of 989 TFLOP/s. (is a gradient, by cuDNN) -> keys ->
# TFLOP/s. Forward passes are causal. FlashAttention-2 stands for the gradients of our own kernel.
_ATTENTION_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_ATTENTION_RATES = {
    (False, True): (315, 410, 484, 518, 529, 539),
    (False, False): (146, 273, 323, 353, 369, 378),
    (True, True): (305, 408, 465, 499, 518, 516),
    (True, False): (214, 260, 291, 310, 318, 322),
}
_ATTENTION_PEAK = 989


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """A measured rate as a share of its bound.

    Attributes:
      value: the share, between 0 and 1.
      source: where the measurement is published.
    """

    value: float
    source: str


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """The measured time of one collective over the devices of a topology.

    Attributes:
      kind: HLO's opcode of the collective.
      devices: number of devices of a group.
      bytes: size of one device's operand or result, whichever is larger.
      source: where the measurement is published.
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


_MIB = 2**20
_V3_SLICES = {16: "4x2", 32: "4x4", 64: "4x8", 128: "8x8", 256: "8x16", 512: "16x16"}
_V3_MICROSECONDS = {
    ("all-to-all", 8): (286, 296, 548, 732, 1226, 1294),
    ("all-reduce", 8): (285, 170, 235, 175, 275, 185),
    ("all-to-all", 32): (1105, 1148, 2185, 2583, 4968, 5078),
    ("all-reduce", 32): (1132, 617, 921, 554, 952, 589),
}
FIGURE_9 = tuple(
    MeasuredCollective(f"v3:{shape}", kind, devices, mib * _MIB, microseconds * 1e-6, _FIGURE_9)
    for (kind, mib), times in _V3_MICROSECONDS.items()
    for (devices, shape), microseconds in zip(_V3_SLICES.items(), times, strict=True)
)
_FIGURE_9_AT_2048 = tuple(
    dataclasses.replace(
        point,
        topology="v3:32x32",
        devices=2048,
        seconds=3.75 * point.seconds,
        source=_FIGURE_9_SCALING,
    )
    for point in FIGURE_9
    if point.kind == "all-to-all" and point.devices == 128
)

# All-gathers over four chips in a square, with results [4, rows, 8, 128] in float32: rows -> GB/s
# received. Each chip receives three quarters of the result.
_IRONWOOD_ALL_GATHER = {64: 71.77, 256: 129.19, 1024: 161.90, 4096: 174.77, 16384: 178.77}
IRONWOOD = tuple(
    MeasuredCollective(
        "v5p:2x2x1",
        "all-gather",
        4,
        4 * rows * 8 * 128 * 4,
        3 * rows * 8 * 128 * 4 / (rate * 1e9),
        _IRONWOOD + "guides/collectives/all_gather.md (links of TPU7x, as fast as those of v5p)",
    )
    for rows, rate in _IRONWOOD_ALL_GATHER.items()
)

NCCL = {
    chip: tuple(
        MeasuredCollective(
            f"gpu:{chip}:1x8", kind, devices, mib * _MIB, microseconds * 1e-6, nccl_times.SOURCE
        )
        for (kind, devices), times in found.items()
        for mib, microseconds in zip(nccl_times.MIB, times, strict=True)
    )
    for chip, found in nccl_times.MICROSECONDS.items()
}

# XLA's ragged exchange within a host: one block of threads copies the rows for each peer. With
# 4,096 rows of 7,168 numbers, 8 GPUs send 16.42 GiB/s each.
_RAGGED_BYTES = 4096 * 7168 * 2
_RAGGED_RATE_OF_A_PEER = 16.42 * 2**30 / 7
RAGGED = tuple(
    MeasuredCollective(
        "gpu:b200:1x8",
        "ragged-all-to-all",
        devices,
        _RAGGED_BYTES,
        _RAGGED_BYTES / devices / _RAGGED_RATE_OF_A_PEER,
        _RAGGED_ON_B200 + ("" if devices == 8 else _RAGGED_IN_SMALL_GROUPS),
    )
    for devices in (2, 4, 8)
)

# As in nccl-tests: each of n devices sends this factor times (n - 1) / n bytes per byte of buffer.
_BUS_FACTORS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
# Bus bandwidth of all-reduces over the 72 GPUs of a rack, by their bytes.
_GB200_BUS = {2**29: 586.06e9, 2**30: 681.17e9, 2**31: 757.78e9, 2**32: 839.16e9}
GB200 = tuple(
    MeasuredCollective(
        "gpu:gb200:1x72", kind, 72, size, factor * 71 / 72 * size / rate, _RACK + ", all-reduce"
    )
    for kind, factor in _BUS_FACTORS.items()
    for size, rate in _GB200_BUS.items()
)

# With this many updates for each peer in place of one, the kernel of a step's ragged exchanges was
# so many times as fast.
_UPDATES, _FASTER = 32, 17.8
_UPDATES_ON_GB200 = (
    "EP16 on 16 GB200, 2026-08-10, https://github.com/marin-community/marin/issues/8077"
)

# All-to-alls between hosts send each pair of GPUs its rows. XLA's ragged exchange does the same
# there: the same rows over two hosts took 50.06 GiB/s of each GPU.
PAIRS = {
    2: MeasuredCollective(
        "gpu:b200:2x8",
        "ragged-all-to-all",
        16,
        _RAGGED_BYTES,
        15 / 16 * _RAGGED_BYTES / (50.06 * 2**30),
        _RAGGED_ON_B200,
    ),
    8: MeasuredCollective("gpu:h100:8x8", "all-to-all", 64, 8 * _MIB, 337.8e-6, _PAIRS_OF_8_HOSTS),
}

# Bus bandwidth of all-reduces over four hosts: MiB of the buffer -> GB/s. The benchmark waits for
# each call, which takes about 0.3 ms: an all-reduce of a few bytes over 16 hosts of H100 takes
# 62 us (https://github.com/NVIDIA/nccl/issues/1469). On these hosts, 64 MiB reach 150 GB/s, too.
_HOSTS_BUS = {1: 5.37, 4: 18.90, 16: 64.43, 64: 156.74, 256: 229.09, 1024: 361.99, 16384: 381.80}
HOSTS = tuple(
    MeasuredCollective(
        "gpu:b200:4x8",
        "all-reduce",
        32,
        mib * _MIB,
        2 * 31 / 32 * mib * _MIB / (rate * 1e9),
        _BETWEEN_HOSTS,
    )
    for mib, rate in _HOSTS_BUS.items()
)

# All-reduces over two hosts: MiB of the buffer -> seconds. Those over four hosts stand for larger
# buffers.
_TWO_HOSTS = {1: 88e-6, 10: 157e-6, 100: 647e-6}
FEW_HOSTS = (
    *(
        MeasuredCollective(
            "gpu:h100:2x8", "all-reduce", 16, mib * _MIB, seconds, _BETWEEN_TWO_HOSTS
        )
        for mib, seconds in _TWO_HOSTS.items()
    ),
    *(point for point in HOSTS if point.bytes > max(_TWO_HOSTS) * _MIB),
)
# Numbers of hosts -> the measurements that stand for them.
_BY_HOSTS = {4: FEW_HOSTS, 16: HOSTS}

# Values of `Chip.measured_links` -> the measurements.
_MEASURED = {
    "v3": FIGURE_9 + _FIGURE_9_AT_2048,
    "v5p": IRONWOOD,
    **{chip: (*points, *RAGGED) for chip, points in NCCL.items()},
    "gb200": (*NCCL["b200"], *GB200, *RAGGED),
}

# Collectives between TPU slices.
ACROSS_SLICES = Efficiency(1.0, "nothing is published: the bound holds")

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
    """Returns the share of the peak rate that a matrix product reaches.

    Args:
      chip: the chip.
      flops: FLOPs of the product.
      dtype: type of the operands, by its name in HLO or NumPy.
    """
    sizes = [(2 * n**3, share) for n, share in chip.product_efficiency.items()]
    if rate_of(dtype) == FP8 and chip.fp8_efficiency is not None:
        # A product that takes as long in bfloat16 has half as many FLOPs.
        share = _interpolate(sizes, flops / 2) / max(chip.product_efficiency.values())
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
    rates = _ATTENTION_RATES[attention.is_gradient, attention.is_cudnn]
    shares = [
        (length, rate / _ATTENTION_PEAK)
        for length, rate in zip(_ATTENTION_LENGTHS, rates, strict=True)
    ]
    return Efficiency(_interpolate(shares, attention.keys), _FLASH_3)


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
      kind: HLO's opcode of the collective.
      size: bytes of one device's operand or result, whichever is larger.
      devices: number of devices of a group.
      chip: the chip.
    """
    points = _points(kind, chip)
    if not points:
        return Efficiency(1.0, "nothing is published: the bound holds")
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
      updates: updates for each device.
      whole: the efficiency of an all-to-all, which no exchange exceeds.
    """
    share = min(math.log(max(updates, 1)) / math.log(_UPDATES), 1.0)
    value = min(one.value * _FASTER**share, whole.value)
    return Efficiency(max(value, one.value), f"{one.source}; {_UPDATES_ON_GB200}")


def network_efficiency(kind: str, size: float, hosts: int) -> Efficiency:
    """Returns the efficiency of a collective between hosts of GPUs: its bound over its time.

    Args:
      kind: HLO's opcode of the collective.
      size: bytes through the network adapter of one GPU, in one direction.
      hosts: number of hosts of a group.
    """
    levels = [(n, _interpolate(_hosts_points(n), size)) for n in _BY_HOSTS]
    found = Efficiency(_interpolate(levels, hosts), f"{_BETWEEN_TWO_HOSTS}; {_BETWEEN_HOSTS}")
    if kind not in ("all-to-all", "ragged-all-to-all"):
        return found
    # The measured all-to-alls are small. Large ones reach the rate of large all-reduces.
    pairs = _interpolate([(n, point.efficiency) for n, point in PAIRS.items()], hosts)
    if pairs < found.value:
        return found
    return Efficiency(pairs, f"{_RAGGED_ON_B200}; {_PAIRS_OF_8_HOSTS}")


@functools.cache
def _hosts_points(hosts: int) -> list[tuple[float, float]]:
    """Returns (bytes through the adapter of one GPU, efficiency) for each measurement."""
    points = []
    for point in _BY_HOSTS[hosts]:
        rate = topologies.get(point.topology).chip.network_bandwidth
        assert rate
        points.append((point.efficiency * point.seconds * rate, point.efficiency))
    return points


def sources(chip: Chip) -> tuple[str, ...]:
    """Returns the sources of a chip's efficiencies."""
    found = [matmul_efficiency(chip, 1e15).source, memory_efficiency(chip).source]
    if chip.fp8_efficiency is not None:
        found.insert(1, chip.sources["fp8_efficiency"])
    for kind in ("all-reduce", "all-gather", "all-to-all", "ragged-all-to-all"):
        found += [point.source for point in _points(kind, chip)]
    if chip.kind == "gpu":
        found += [_BETWEEN_TWO_HOSTS, _BETWEEN_HOSTS, _RAGGED_ON_B200, _PAIRS_OF_8_HOSTS]
    return tuple(dict.fromkeys(found))


def _points(kind: str, chip: Chip) -> list[MeasuredCollective]:
    """The measurements that stand for a collective on a chip."""
    if not chip.measured_links:
        return []
    measured: Sequence[MeasuredCollective] = _MEASURED[chip.measured_links]
    if chip.kind == "tpu" and kind in ("all-to-all", "ragged-all-to-all"):
        # Nothing is published for later TPUs.
        measured = _MEASURED["v3"]
    for similar in _SIMILAR_KINDS.get(kind, ("all-reduce", "all-gather")):
        found = [point for point in measured if point.kind == similar]
        if found:
            return found
    return []


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolates (x, y) points linearly over log x; beyond them, the outermost y holds."""
    points = sorted(points)
    if at <= points[0][0]:
        return points[0][1]
    for (low, low_value), (high, high_value) in zip(points, points[1:], strict=False):
        if at <= high:
            share = math.log(at / low) / math.log(high / low)
            return low_value + share * (high_value - low_value)
    return points[-1][1]
