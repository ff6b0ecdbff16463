"""Reads the mesh of a jax program and the shardings of its arrays.

A program exported for Shardy names its mesh, and its axes in every sharding:
https://openxla.org/shardy/sharding_representation. One for GSPMD only numbers the devices; the axes
are then those of a mesh that expresses all shardings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import ir, sdy
from lingvo_gshard.runtime.lowering.sharding_text import split_of_text
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

# (attribute of a sharding or None, rank) of an array.
Sharded: TypeAlias = "tuple[ir.Attribute | None, int]"
SHARDY, GSPMD = "sdy.sharding", "mhlo.sharding"
_MOST_AXES = 4


def shardy_mesh(module: ir.Module) -> Mesh | None:
    """Returns the mesh that a module names; None if it has no mesh of several axes or devices.

    Raises:
      UserError: the module has several meshes.
    """
    found = {}
    for operation in module.body:
        if operation.operation.name == "sdy.mesh":
            axes = [sdy.MeshAxisAttr(axis) for axis in sdy.MeshAttr(operation.mesh).axes]
            if axes:
                found[tuple((_identifier(axis.name), axis.size) for axis in axes)] = None
    if len(found) > 1:
        meshes = " and ".join(str(Mesh(axes)) for axes in found)
        raise UserError(f"it has several meshes, {meshes}, and a plan has one")
    return Mesh(next(iter(found))) if found else None


def gspmd_mesh(shardings: Sequence[Sharded], devices: int, given: Mesh | None) -> Mesh:
    """Returns the mesh with the fewest axes that can express shardings of numbered devices.

    Args:
      shardings: the shardings of the program's arrays.
      devices: the number of devices.
      given: the mesh that the user says it is, if any.

    Raises:
      UserError: the shardings are no splits over `given`, or over any mesh of up to four axes.
    """
    texts = {(ir.StringAttr(a).value, rank) for a, rank in shardings if a is not None}
    for mesh in [given] if given else _meshes(devices):
        if all(split_of_text(text, rank, mesh) is not None for text, rank in texts):
            return mesh
    which = f"--mesh={given}" if given else f"any mesh of up to {_MOST_AXES} axes"
    shown = ", ".join(sorted(text for text, _ in texts)[:3])
    raise UserError(f"its shardings ({shown}) are no splits over {which}")


def split_of(attribute: ir.Attribute | None, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split that an array's sharding describes; None without a sharding.

    Raises:
      UserError: the sharding is no split over the mesh's axes.
    """
    if attribute is None:
        return None
    if isinstance(attribute, ir.StringAttr):
        split = split_of_text(ir.StringAttr(attribute).value, rank, mesh)
        if split is None:
            raise UserError(f"its sharding {attribute} is no split over {mesh}")
        return split
    split = []
    for dimension in sdy.TensorShardingAttr(attribute).dimension_shardings:
        axes = [sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dimension).axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            raise UserError(f"its sharding {attribute} splits over a part of an axis")
        split.append(tuple(_identifier(axis.name) for axis in axes))
    return tuple(split)


def sharding_of(attributes: Mapping[str, ir.Attribute]) -> ir.Attribute | None:
    """Returns the sharding among the attributes of an argument or a result, if there is one."""
    return attributes.get(SHARDY, attributes.get(GSPMD))


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _meshes(devices: int) -> Iterator[Mesh]:
    """Yields the meshes of a number of devices, those with fewer axes first."""
    for count in range(1, _MOST_AXES + 1):
        for sizes in _factorizations(devices, count):
            names = ["data"] if count == 1 else [f"axis_{index}" for index in range(count)]
            yield Mesh(tuple(zip(names, sizes, strict=True)))


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields the ordered factorizations of a number into `count` factors of more than 1."""
    if count == 1:
        yield (number,)
        return
    for first in itertools.takewhile(lambda f: f < number, itertools.count(2)):
        if number % first == 0:
            for rest in _factorizations(number // first, count - 1):
                yield (first, *rest)
