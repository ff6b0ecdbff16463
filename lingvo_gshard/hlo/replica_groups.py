"""Which devices a collective joins, and along which axes of the mesh that is."""

from __future__ import annotations

import functools
import itertools
import math
import re

import numpy as np

from lingvo_gshard.sharding.mesh import Mesh

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"@?mesh[\[<](?P<axes>[^\]>]*)[\]>](?P<order>[^{]*)\{(?P<joined>[^}]*)\}")
_AXIS = re.compile(r"([\w.\-]+)'?=(\d+)")
_PART_OF_AXIS = re.compile(r"([\w.\-]+)'?(?::\((\d+)\)(\d+))?")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?\)?\s*$")
_BRACES = re.compile(r"\{([\d,\s]*)\}")


def parse_groups(text: str, devices: int) -> list[tuple[int, ...]]:
    """Returns the groups; `{}` is one of all devices.

    text: `{{0,1},{2,3}}`, or `[2,4]<=[4,2]T(1,0)`, or `mesh['a'=2,'b'=4] {'b'}`, of which the mesh
    may be followed by the order of its devices, and an axis by a part of it: `'b':(1)2`.

    Raises ValueError if the text is none of these.
    """
    iota = _IOTA.fullmatch(text.strip())
    if iota:
        shape, sizes, order = (_integers(part or "") for part in iota.groups())
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        groups = ids.transpose(order or range(len(sizes))).reshape(shape)
        return [tuple(group) for group in groups.reshape(shape[0], -1).tolist()]
    mesh = _MESH.fullmatch(text.strip())
    if mesh:
        return _groups_of_mesh(mesh["axes"], mesh["order"], mesh["joined"])
    if not text.startswith("{"):
        raise ValueError(f"HLO text: {text!r} are no replica groups")
    groups = [_integers(group) for group in _BRACES.findall(text[1:-1])]
    return [group for group in groups if group] or [tuple(range(devices))]


def _groups_of_mesh(axes: str, order: str, joined: str) -> list[tuple[int, ...]]:
    """Groups along axes, or parts of axes, of a mesh that XLA names itself.

    A part `(before)size` of an axis is the middle one of its sizes before, size and the rest.
    """
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    parts = [
        (name, int(before or 1), int(before or 1) * int(size or sizes[name]))
        for name, before, size in _PART_OF_AXIS.findall(joined)
    ]
    spans, dimensions = [], []
    for name, size in sizes.items():
        cuts = {1, size, *(cut for part in parts if part[0] == name for cut in part[1:])}
        for low, high in itertools.pairwise(sorted(cuts)):
            spans.append((name, low, high))
            dimensions.append(high // low)
    chosen = [
        index
        for part in parts
        for index, (name, low, high) in enumerate(spans)
        if name == part[0] and low >= part[1] and high <= part[2]
    ]
    rest = [index for index in range(len(spans)) if index not in chosen]
    ids = _device_order(order, math.prod(sizes.values())).reshape(dimensions)
    group = math.prod(dimensions[index] for index in chosen)
    return [tuple(g) for g in ids.transpose([*rest, *chosen]).reshape(-1, group).tolist()]


def _device_order(text: str, devices: int) -> np.ndarray:
    """The ids of a mesh's devices: as they come, or `device_ids=([4,2]T(1,0))`, or a list."""
    iota = _ORDER.search(text)
    if iota:
        sizes, order = (_integers(part or "") for part in iota.groups())
        ids = np.arange(devices).reshape(sizes)
        return ids.transpose(order or range(len(sizes))).reshape(-1)
    listed = re.findall(r"\d+", text)
    return np.array([int(number) for number in listed]) if listed else np.arange(devices)


def axes_of_groups(text: str, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """Returns the axes over which groups reach, in the mesh's order, and a group's size.

    No axes if a group is one device, or if the groups are not those of any axes.
    """
    return _axes_of_groups(text, mesh)


@functools.lru_cache(maxsize=2**12)
def _axes_of_groups(text: str, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    groups = parse_groups(text, mesh.size)
    size = max(len(group) for group in groups)
    return _groups_of_axes(mesh).get(_canonical(groups), ()), size


def axes_of_pairs(text: str, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """Returns the axes along which `{{0,1},{1,2}}` sends, and how many devices they join.

    That is the axes in whose positions any pair differs; no axes if an id is not of the mesh.
    """
    pairs = [_integers(pair) for pair in _BRACES.findall(text[1:-1])]
    pairs = np.array([pair for pair in pairs if len(pair) == 2], np.int64).reshape(-1, 2)
    if not pairs.size or pairs.max() >= mesh.size:
        return (), 1
    sources, targets = (np.array(np.unravel_index(pairs[:, i], mesh.shape)) for i in (0, 1))
    differs = (sources != targets).any(axis=1)
    axes = tuple(name for name, moved in zip(mesh.names, differs, strict=True) if moved)
    return axes, math.prod(mesh.axis_size(name) for name in axes)


@functools.lru_cache(maxsize=64)
def _groups_of_axes(mesh: Mesh) -> dict[frozenset, tuple[str, ...]]:
    """The groups that axes of more than one device form -> those axes."""
    found = {}
    wide = [index for index, size in enumerate(mesh.shape) if size > 1]
    for count in range(1, len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            rest = [index for index in range(len(mesh.shape)) if index not in axes]
            size = math.prod(mesh.shape[index] for index in axes)
            groups = mesh.ids.transpose([*rest, *axes]).reshape(-1, size).tolist()
            found[_canonical(groups)] = tuple(mesh.names[index] for index in axes)
    return found


def _canonical(groups: list) -> frozenset:
    """Equal for equal groups in whatever order; groups of one device are left out."""
    return frozenset(frozenset(group) for group in groups if len(group) > 1)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())
