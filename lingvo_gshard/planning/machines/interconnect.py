"""How long collectives take on the links between chips: bounds that no algorithm can beat.

Every time here is proportional to the bytes, so a group of devices has one rate. A collective is
as slow as the narrowest place that its bytes must pass: the links of one chip, the links between
two parts of a torus (Dally and Towles, Principles and Practices of Interconnection Networks,
2004, section 3.3), or all links together, since an all-reduce of n devices moves every byte
2 (n - 1) times, a gathering or scattering n - 1 times (NCCL tests, Performance,
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from lingvo_gshard.hlo.operation import CollectiveCall
from lingvo_gshard.planning.machines.topologies import Topology
from lingvo_gshard.sharding.mesh import Mesh

# Each kind moves bytes as one of these does.
_LIKE = {
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "all-gather",
    "collective-broadcast": "all-gather",
    "collective-permute": "collective-permute",
}

# Bytes of shared memory that a core reads and writes for a byte that it hands on.
_COPIES = 2


@dataclasses.dataclass(frozen=True)
class Places:
    """Where devices are, and what joins them.

    node_of: of each device, in the mesh's order: the chip of a TPU, the host of a GPU.
    coordinates: [nodes, dimensions]. shape, wraps: of the torus; () for GPUs.
    links: of each node along each dimension, in and out alike: [nodes, dimensions]; rate: bytes/s
        of one of them.
    """

    node_of: np.ndarray
    coordinates: np.ndarray
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    links: np.ndarray
    rate: float


def seconds_bound(call: CollectiveCall, topology: Topology, mesh: Mesh) -> float:
    """Returns seconds of one collective that no way over the links can be faster than."""
    args = (call.kind, call.axes, call.group_size, topology, mesh, False)
    return call.bytes * _seconds_per_byte(*args)


def seconds_by_formula(call: CollectiveCall, topology: Topology, mesh: Mesh) -> float:
    """Returns seconds of one collective over those links alone that lie along its groups.

    Rings of all-reduces and the like are laid along the dimensions of the torus that their groups
    extend in, and leave the other links idle, which the bound counts in.
    """
    args = (call.kind, call.axes, call.group_size, topology, mesh, True)
    return call.bytes * _seconds_per_byte(*args)


def seconds_latency(call: CollectiveCall, topology: Topology, mesh: Mesh) -> float:
    """Returns seconds that the farthest devices of a group are apart: hops, not bytes.

    A hop of a TPU takes about 1 us ("How to Scale Your Model", part 3,
    https://jax-ml.github.io/scaling-book/sharding); elsewhere 0, since it is in what was measured.
    """
    if topology.kind != "tpu":
        return 0.0
    return 1e-6 * _hops(call.axes, call.group_size, topology, mesh)


def groups(mesh: Mesh, axes: tuple[str, ...], size: int) -> np.ndarray:
    """Returns the groups of devices along mesh axes: ids in the mesh's order, [groups, size].

    Groups that are not along axes (axes is empty) are taken to be of neighbors.
    """
    if not axes:
        size = math.gcd(max(size, 1), mesh.size)
        return np.arange(mesh.size).reshape(-1, size)
    dimensions = [mesh.names.index(name) for name in axes]
    others = [i for i in range(len(mesh.shape)) if i not in dimensions]
    reached = math.prod(mesh.shape[i] for i in dimensions)
    return mesh.ids.transpose(others + dimensions).reshape(-1, reached)


@functools.lru_cache(maxsize=32)
def places(topology: Topology, mesh: Mesh) -> Places:
    """Returns where the devices of a mesh are.

    TPU cores are listed host by host, 2x2 chips each, the first coordinate fastest; a mesh of
    contiguous order keeps that order, one of topological order is arranged by jax.
    """
    if topology.kind == "gpu":
        hosts, each = topology.shape
        rate = topology.chip.network_bandwidth * each
        node = np.arange(topology.devices) // each
        nodes = np.arange(hosts)[:, None]
        return Places(node, nodes, (), (), np.ones((hosts, 1)), rate)
    coordinates = _tpu_coordinates(topology, mesh)
    shape, wraps = topology.shape, topology.wraps
    node = np.ravel_multi_index(tuple(coordinates.T), shape)
    nodes = np.stack(np.unravel_index(np.arange(topology.chips), shape), axis=1)
    inner = (nodes > 0) * 1 + (nodes < np.array(shape) - 1) * 1
    links = np.where(wraps, 2, inner)
    return Places(node, nodes, shape, wraps, links, topology.chip.link_bandwidth)


def _tpu_coordinates(topology: Topology, mesh: Mesh) -> np.ndarray:
    """Returns the chip's coordinates of each device, in the mesh's order: [devices, dimensions]."""
    dimensions = len(topology.shape)
    if mesh.device_order == "topology" and topology.compiler == "tpu":
        devices = mesh.arrange(topology.compile_devices()).flat
        return np.array([device.coords[:dimensions] for device in devices])
    shape = topology.shape + (1,) * (3 - dimensions)
    inner = (2, 2, 1) if max(shape) > 1 else (1, 1, 1)
    outer = [size // of_host for size, of_host in zip(shape, inner, strict=True)]
    # From slowest to fastest: hosts z, y, x, then a host's chips z, y, x, then the cores.
    order = [*reversed(outer), *reversed(inner), topology.chip.partitions]
    index = np.indices(order).reshape(len(order), -1)
    axes = [index[2 - i] * inner[i] + index[5 - i] for i in range(3)]
    return np.stack(axes, axis=1)[:, :dimensions]


@functools.lru_cache(maxsize=1024)
def _seconds_per_byte(
    kind: str,
    axes: tuple[str, ...],
    size: int,
    topology: Topology,
    mesh: Mesh,
    along: bool,
) -> float:
    members = groups(mesh, axes, size)
    like = _LIKE.get(kind, "all-reduce")
    if members.shape[1] == 1:
        return 0.0
    if topology.kind == "cpu":
        return _COPIES / topology.chip.memory_bandwidth
    where = places(topology, mesh)
    # A buffer passes through the memory of its device in any case.
    slowest = [1 / topology.chip.memory_bandwidth]
    if topology.kind == "gpu":
        share = 1 if like in ("all-reduce", "collective-permute") else 1 - 1 / members.shape[1]
        slowest.append(share / topology.chip.link_bandwidth)
    if like == "collective-permute":
        slowest.append(_next(where, members))
    else:
        parts = _parts(where, members)
        used = _extent(where, members) if along else np.ones(where.links.shape[1], bool)
        links = where.links[:, used].sum(1)
        slowest.append(_through_nodes(like, where, links, parts))
        slowest.append(_through_all(like, where, links, parts))
        slowest += [_through_cut(like, where, members, i) for i in range(len(where.shape))]
    return max(slowest)


def _extent(where: Places, members: np.ndarray) -> np.ndarray:
    """Returns along which dimensions of the torus groups extend; of hosts, all."""
    if not where.shape:
        return np.ones(1, bool)
    at = where.coordinates[where.node_of[members]]
    return (at != at[:, :1]).any(axis=(0, 1))


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of groups that share a node.

    node: of each part. members: how many of its group it has. size: of a group. groups: how many.
    """

    node: np.ndarray
    members: np.ndarray
    size: int
    groups: int


def _parts(where: Places, members: np.ndarray) -> _Parts:
    groups, size = members.shape
    nodes = len(where.links)
    keys = np.arange(groups)[:, None] * nodes + where.node_of[members]
    keys, counts = np.unique(keys, return_counts=True)
    return _Parts(keys % nodes, counts, size, groups)


def _crossing(like: str, inside: np.ndarray, size: int) -> np.ndarray:
    """Returns the share of a buffer that must leave a part with so many of a group's members.

    As much must enter it: of an all-reduce the sum of the others, of an all-gather their shards.
    """
    outside = size - inside
    apart = (inside > 0) & (outside > 0)
    if like == "all-to-all":
        return inside * outside / size
    if like == "all-reduce":
        return apart * 1.0
    return apart * np.maximum(inside, outside) / size


def _through_nodes(like: str, where: Places, links: np.ndarray, parts: _Parts) -> float:
    """Seconds per byte for what leaves or enters the node with the narrowest links."""
    crossing = _crossing(like, parts.members, parts.size)
    leaving = np.bincount(parts.node, weights=crossing, minlength=len(links))
    used = leaving > 0
    return float((leaving[used] / (links[used] * where.rate)).max(initial=0.0))


def _through_all(like: str, where: Places, links: np.ndarray, parts: _Parts) -> float:
    """Seconds per byte if all links shared in moving every byte as often as it must be moved."""
    moves = len(parts.node) - parts.groups
    if like == "all-to-all" or not moves:
        return 0.0
    return float((2 if like == "all-reduce" else 1) * moves / (links.sum() * where.rate))


def _through_cut(like: str, where: Places, members: np.ndarray, dimension: int) -> float:
    """Seconds per byte through the narrowest pair of cuts across one dimension of the torus."""
    length, wrap = where.shape[dimension], where.wraps[dimension]
    groups, size = members.shape
    at = where.coordinates[where.node_of[members], dimension]
    slabs = np.zeros((groups, length), np.int64)
    np.add.at(slabs, (np.arange(groups)[:, None], at), 1)
    # Twice around, so that a part may begin anywhere on a ring.
    before = np.cumsum(np.concatenate([np.zeros((groups, 1)), slabs, slabs], axis=1), axis=1)
    crossing = 0.0
    for start in range(length if wrap else 1):
        for width in range(1, length // 2 + 1 if wrap else length):
            inside = before[:, start + width] - before[:, start]
            crossing = max(crossing, float(_crossing(like, inside, size).sum()))
    links = (2 if wrap else 1) * len(where.links) // length
    return crossing / (links * where.rate)


def _next(where: Places, members: np.ndarray) -> float:
    """Seconds per byte to hand a buffer to the next of the group: one link, if it is elsewhere."""
    apart = where.node_of[members] != where.node_of[np.roll(members, -1, axis=1)]
    if not apart.any():
        return 0.0
    if where.shape:
        return 1 / where.rate
    leaving = np.bincount(where.node_of[members][apart], minlength=len(where.links)).max()
    return float(leaving / where.rate)


@functools.lru_cache(maxsize=1024)
def _hops(axes: tuple[str, ...], size: int, topology: Topology, mesh: Mesh) -> int:
    where = places(topology, mesh)
    members = where.coordinates[where.node_of[groups(mesh, axes, size)]]
    hops = 0
    for dimension, (length, wrap) in enumerate(zip(where.shape, where.wraps, strict=True)):
        span = int(np.ptp(members[..., dimension], axis=1).max())
        hops += min(span, length // 2) if wrap else span
    return hops
