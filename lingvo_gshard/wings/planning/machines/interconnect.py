"""Lower bounds on the time of collectives on the links between chips.

Every bound is proportional to the bytes, so each group of devices has a rate. The bound is the
largest of three:

- the links of a single chip carry what enters or leaves it;
- the links across a cut of the torus carry what the two sides exchange (Dally and Towles,
  Principles and Practices of Interconnection Networks, 2004, section 3.3);
- all links together carry each byte as often as it must move: 2 (n - 1) times in an all-reduce of n
  devices, n - 1 times in a gather or scatter (NCCL tests, Performance,
  https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

The data-center network joins TPU slices. The same bounds hold for this network, with slices as
nodes: each chip has the published rate to other slices. The network's latency is not published and
is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo.operations import Collective
from lingvo_gshard.wings.planning.machines.chips import Chip
from lingvo_gshard.wings.planning.machines.topologies import Topology

# Collectives -> the collective that moves bytes in the same pattern.
_PATTERNS = {
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "all-gather",
    "collective-broadcast": "all-gather",
    "collective-permute": "collective-permute",
}

# Seconds of NCCL's low-latency protocol: to begin, for a step over NVLink, for a step over the
# network (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, at 01afd20). Among
# several hosts, a step within a host takes longer by a factor.
_RING, _TREE = (3.6e-6, 0.47e-6, 2.7e-6), (4.4e-6, 0.52e-6, 5.0e-6)
_AMONG_HOSTS = 1.8

# Bytes of shared memory that a CPU core reads and writes for each byte that it sends.
_COPIES = 2


@dataclasses.dataclass(frozen=True)
class Network:
    """The nodes that a mesh's devices lie on, and the links between nodes.

    A node is a TPU chip, a host of GPUs, or a slice of TPUs.

    Attributes:
      node_of: [devices], the node of each device, in the mesh's order.
      coordinates: [nodes, dimensions], the position of each node.
      shape: the torus of each slice, in nodes; () for GPUs and slices.
      wraps: for each dimension of the torus, whether it is a ring; () for GPUs and slices.
      links: [nodes, dimensions], the number of links of each node along each dimension, which is
        the same for both directions.
      rate: bytes per second of one link in one direction.
    """

    node_of: np.ndarray
    coordinates: np.ndarray
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    links: np.ndarray
    rate: float


def seconds_bound(collective: Collective, topology: Topology, mesh: Mesh) -> float:
    """Returns a lower bound, in seconds, on the time of one collective."""
    call = dataclasses.replace(collective, bytes=1)
    return collective.bytes * _seconds_per_byte(call, topology, mesh, along_groups=False)


def seconds_by_formula(collective: Collective, topology: Topology, mesh: Mesh) -> float:
    """Returns the seconds of one collective that only uses links along its groups.

    Ring algorithms follow the dimensions of the torus that their groups extend along. They leave
    the other links idle, which `seconds_bound` includes.
    """
    call = dataclasses.replace(collective, bytes=1)
    return collective.bytes * _seconds_per_byte(call, topology, mesh, along_groups=True)


def seconds_latency(collective: Collective, topology: Topology, mesh: Mesh) -> float:
    """Returns the latency, in seconds, of one collective of a few bytes.

    - TPUs: a hop between chips takes about 1 us ("How to Scale Your Model", part 3,
      https://jax-ml.github.io/scaling-book/sharding).
    - GPUs: NCCL's own model of its low-latency protocol, which chooses its algorithms.
    - CPUs: 0.
    """
    call = dataclasses.replace(collective, bytes=1)
    if topology.kind == "gpu":
        return _seconds_to_begin(call, topology, mesh)
    return 1e-6 * _hops(call, topology, mesh) if topology.kind == "tpu" else 0.0


def seconds_within_hosts(collective: Collective, chip: Chip) -> float:
    """Returns a lower bound on the time that a collective takes through the links of its hosts.

    A group of GPUs that spans several hosts uses these links, too: every GPU sends or receives as
    much as in a group of one host.
    """
    pattern = _PATTERNS.get(collective.kind, "all-reduce")
    is_whole = pattern in ("all-reduce", "collective-permute")
    share = 1 if is_whole else 1 - 1 / collective.group_size
    return collective.bytes * share / chip.link_bandwidth


def spanned_hosts(collective: Collective, topology: Topology, mesh: Mesh) -> int:
    """Returns the number of hosts of GPUs that a group of a collective spans; 1 for other chips."""
    if topology.kind != "gpu":
        return 1
    return _spanned_hosts(dataclasses.replace(collective, bytes=1), topology, mesh)


@functools.lru_cache(maxsize=1024)
def _spanned_hosts(call: Collective, topology: Topology, mesh: Mesh) -> int:
    hosts = make_network(topology, mesh).node_of[_members(call, topology, mesh)]
    return max(len(np.unique(group)) for group in hosts)


def spanned_slices(axes: tuple[str, ...], topology: Topology, mesh: Mesh) -> int:
    """Returns the number of slices that groups along whole mesh axes span."""
    across = dict(zip(mesh.names, mesh.across_slices(topology.slices), strict=True))
    return math.prod(across[axis] for axis in axes)


def groups(
    mesh: Mesh, axes: tuple[str, ...], size: int, slices: int = 1, spanned: int = 1
) -> np.ndarray:
    """Returns the groups of devices along mesh axes, as positions in the mesh: [groups, size].

    The members of a group are listed slice by slice.

    Args:
      axes: names of the axes; () for groups that follow no axes. Such groups are assumed to consist
        of neighbors, or of counterparts in several slices.
      slices: number of TPU slices that the mesh extends over.
      spanned: number of slices of a group. If it is 1, groups extend along the part of each axis
        within a slice. If it is `size`, groups extend along the part of each axis across slices.
    """
    if not axes:
        ids = np.arange(mesh.size).reshape(slices, -1)
        if spanned > 1:
            return ids.T
        return ids.reshape(-1, math.gcd(max(size, 1), ids.shape[1]))
    across = mesh.across_slices(slices)
    parts = [part for each in zip(across, mesh.shape, strict=True) for part in each]
    parts[1::2] = [whole // part for part, whole in zip(across, mesh.shape, strict=True)]
    named = [mesh.names.index(name) for name in axes]
    chosen = [2 * i for i in named if spanned > 1]
    chosen += [2 * i + 1 for i in named if spanned == 1 or size > spanned]
    others = [i for i in range(len(parts)) if i not in chosen]
    reached = math.prod(parts[i] for i in chosen)
    return mesh.ids.reshape(parts).transpose(others + chosen).reshape(-1, reached)


def network_rate(chip: Chip) -> float:
    """Returns the bytes per second of `network_bandwidth`. Raises ValueError if it is unknown."""
    if chip.network_bandwidth is None:
        raise ValueError(f"{chip.key}: {chip.sources['network_bandwidth']}")
    return chip.network_bandwidth


@functools.lru_cache(maxsize=32)
def make_network(topology: Topology, mesh: Mesh) -> Network:
    """Returns the network of a mesh's devices.

    libtpu lists TPU cores host by host, 2x2 chips each, with the first coordinate fastest. A mesh
    with device order "contiguous" keeps that order, for "topology" jax arranges the devices.
    """
    if topology.kind == "gpu":
        hosts, gpus = topology.shape
        rate = network_rate(topology.chip) * gpus
        node = np.arange(topology.devices) // gpus
        nodes = np.arange(hosts)[:, None]
        return Network(node, nodes, (), (), np.ones((hosts, 1)), rate)
    shape, wraps, slices = topology.shape, topology.wraps, topology.slices
    coordinates = _tpu_coordinates(topology, mesh)
    chips = math.prod(shape)
    node = np.asarray(np.ravel_multi_index(tuple(coordinates.T), shape))
    node = node + chips * (np.arange(len(node)) // (len(node) // slices))
    nodes = np.stack(np.unravel_index(np.arange(slices * chips) % chips, shape), axis=1)
    inner = (nodes > 0) * 1 + (nodes < np.array(shape) - 1) * 1
    links = np.where(wraps, 2, inner)
    return Network(node, nodes, shape, wraps, links, topology.chip.link_bandwidth)


def _tpu_coordinates(topology: Topology, mesh: Mesh) -> np.ndarray:
    """The chip's coordinates of each device, in the mesh's order: [devices, dimensions]."""
    dimensions = len(topology.shape)
    if mesh.device_order == "topology" and topology.compiler == "tpu":
        devices = mesh.arrange(topology.compile_devices()).flat
        return np.array([device.coords[:dimensions] for device in devices])
    shape = topology.shape + (1,) * (3 - dimensions)
    inner = (2, 2, 1) if max(shape) > 1 else (1, 1, 1)
    outer = [size // of_host for size, of_host in zip(shape, inner, strict=True)]
    # From slowest to fastest: the hosts' z, y, x, their chips' z, y, x, and the cores.
    order = [*reversed(outer), *reversed(inner), topology.chip.partitions]
    index = np.indices(order).reshape(len(order), -1)
    axes = [index[2 - i] * inner[i] + index[5 - i] for i in range(3)]
    return np.tile(np.stack(axes, axis=1)[:, :dimensions], (topology.slices, 1))


def _members(call: Collective, topology: Topology, mesh: Mesh) -> np.ndarray:
    """The groups of a collective, as positions in the mesh: [groups, size]."""
    return groups(mesh, call.axes, call.group_size, topology.slices, call.slices)


@functools.lru_cache(maxsize=1024)
def _seconds_per_byte(
    call: Collective, topology: Topology, mesh: Mesh, *, along_groups: bool
) -> float:
    """The seconds per byte; `along_groups` restricts it to links along the groups."""
    members = _members(call, topology, mesh)
    pattern = _PATTERNS.get(call.kind, "all-reduce")
    if call.slices == 1:
        return _within_slices(pattern, members, topology, mesh, along_groups)
    # A sum moves whole through the slices, of all else the part that stays in a slice.
    share = 1 if pattern in ("all-reduce", "collective-permute") else 1 / call.slices
    members_within = members.reshape(-1, members.shape[1] // call.slices if call.axes else 1)
    return max(
        _across_slices(pattern, members, topology),
        share * _within_slices(pattern, members_within, topology, mesh, along_groups),
    )


def _across_slices(pattern: str, members: np.ndarray, topology: Topology) -> float:
    """Seconds per byte through the data-center network."""
    size = topology.devices // topology.slices
    rate = network_rate(topology.chip) * size
    nodes = np.arange(topology.slices)[:, None]
    links = np.ones((topology.slices, 1))
    network = Network(np.arange(topology.devices) // size, nodes, (), (), links, rate)
    if pattern == "collective-permute":
        return _next(network, members)
    return _through_links(pattern, network, links.sum(1), members)


def _within_slices(
    pattern: str, members: np.ndarray, topology: Topology, mesh: Mesh, along_groups: bool
) -> float:
    """Seconds per byte through the links of each slice, of a host, or between hosts of GPUs."""
    if members.shape[1] == 1:
        return 0.0
    if topology.kind == "cpu":
        return _COPIES / topology.chip.memory_bandwidth
    network = make_network(topology, mesh)
    # Every byte passes through the memory of its device.
    bounds = [1 / topology.chip.memory_bandwidth]
    if topology.kind == "gpu":
        share = 1 if pattern in ("all-reduce", "collective-permute") else 1 - 1 / members.shape[1]
        bounds.append(share / topology.chip.link_bandwidth)
    if pattern == "collective-permute":
        bounds.append(_next(network, members))
    else:
        links = network.links
        if along_groups and network.shape:
            # Those of the torus's dimensions that the groups extend along.
            at = network.coordinates[network.node_of[members]]
            links = links[:, (at != at[:, :1]).any(axis=(0, 1))]
        bounds.append(_through_links(pattern, network, links.sum(1), members))
        bounds += [_through_cut(pattern, network, members, i) for i in range(len(network.shape))]
    return max(bounds)


def _crossing(pattern: str, inside: np.ndarray, size: int) -> np.ndarray:
    """Returns the share of a buffer that must leave a part of a group.

    As much must enter it: the sum of the other parts in an all-reduce, their shards in an
    all-gather. `inside` has the number of members of each part of groups of `size` devices.
    """
    outside = size - inside
    apart = (inside > 0) & (outside > 0)
    if pattern == "all-to-all":
        return inside * outside / size
    if pattern == "all-reduce":
        return apart * 1.0
    return apart * np.maximum(inside, outside) / size


def _through_links(pattern: str, network: Network, links: np.ndarray, members: np.ndarray) -> float:
    """Seconds per byte for the busiest node's links, or if all links share all bytes to move.

    Args:
      links: [nodes], the number of links of each node that may be used.
      members: [groups, size], the devices of each group.
    """
    groups, size = members.shape
    keys = np.arange(groups)[:, None] * len(links) + network.node_of[members]
    # A part is what one node has of a group.
    parts, counts = np.unique(keys, return_counts=True)
    crossing = _crossing(pattern, counts, size)
    leaving = np.bincount(parts % len(links), weights=crossing, minlength=len(links))
    used = leaving > 0
    busiest = float((leaving[used] / (links[used] * network.rate)).max(initial=0.0))
    moves = len(parts) - groups
    if pattern == "all-to-all" or not moves:
        return busiest
    moves *= 2 if pattern == "all-reduce" else 1
    return max(busiest, float(moves / (links.sum() * network.rate)))


def _through_cut(pattern: str, network: Network, members: np.ndarray, dimension: int) -> float:
    """Seconds per byte through the busiest pair of cuts across one dimension of the torus."""
    length, wrap = network.shape[dimension], network.wraps[dimension]
    groups, size = members.shape
    at = network.coordinates[network.node_of[members], dimension]
    slabs = np.zeros((groups, length), np.int64)
    np.add.at(slabs, (np.arange(groups)[:, None], at), 1)
    # Twice around, because an interval may start anywhere on a ring.
    before = np.cumsum(np.concatenate([np.zeros((groups, 1)), slabs, slabs], axis=1), axis=1)
    crossing = 0.0
    for start in range(length if wrap else 1):
        for width in range(1, length // 2 + 1 if wrap else length):
            inside = before[:, start + width] - before[:, start]
            crossing = max(crossing, float(_crossing(pattern, inside, size).sum()))
    links = (2 if wrap else 1) * len(network.links) // length
    return crossing / (links * network.rate)


def _next(network: Network, members: np.ndarray) -> float:
    """Seconds per byte to send a buffer to the next device of the group."""
    apart = network.node_of[members] != network.node_of[np.roll(members, -1, axis=1)]
    if not apart.any():
        return 0.0
    if network.shape:
        return 1 / network.rate
    leaving = np.bincount(network.node_of[members][apart], minlength=len(network.links)).max()
    return float(leaving / network.rate)


@functools.lru_cache(maxsize=1024)
def _hops(call: Collective, topology: Topology, mesh: Mesh) -> int:
    network = make_network(topology, mesh)
    members = network.coordinates[network.node_of[_members(call, topology, mesh)]]
    hops = 0
    for dimension, (length, wrap) in enumerate(zip(network.shape, network.wraps, strict=True)):
        span = int(np.ptp(members[..., dimension], axis=1).max())
        hops += min(span, length // 2) if wrap else span
    return hops


@functools.lru_cache(maxsize=1024)
def _seconds_to_begin(call: Collective, topology: Topology, mesh: Mesh) -> float:
    """Returns NCCL's latency of a collective by its faster algorithm, a ring or a tree."""
    devices = _members(call, topology, mesh).shape[1]
    hosts = _spanned_hosts(call, topology, mesh)
    factor = _AMONG_HOSTS if hosts > 1 else 1.0
    pattern = _PATTERNS[call.kind]
    if devices == 1:
        return 0.0
    begin, within, between = _RING
    if pattern in ("all-to-all", "collective-permute"):
        # All pairs at once.
        return begin + (between if hosts > 1 else within)
    rounds = 2 if pattern == "all-reduce" else 1
    ring = begin + rounds * ((devices - hosts) * within * factor + (hosts - 1) * between)
    if pattern != "all-reduce":
        return ring
    begin, within, between = _TREE
    inner = (devices // hosts - 1) * within * factor
    return min(ring, begin + 2 * (inner + math.log2(hosts) * between))
