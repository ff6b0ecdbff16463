"""Rewrites a module's GSPMD annotations as Shardy constraints over the mesh's named axes.

TensorFlow writes annotations for GSPMD: `custom_call @Sharding` with numbered devices. XLA falls
back to GSPMD for such modules. See https://openxla.org/shardy/sharding_representation.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\](?:(?P<list>\d[\d,]*)"
    r"|<=\[(?P<iota>[\d,]+)\](?:T\((?P<permutation>[\d,]+)\))?)"
    r"(?P<copies> last_tile_dim_replicate)?\}"
)
_MANUAL = ("SPMDFullToShardShape", "SPMDShardToFullShape")


def to_shardy(module: ir.Module, mesh: Mesh) -> None:
    """Rewrites the module's annotations in place.

    Raises:
      ValueError: the module has a manual region, or an annotation that is not a split over axes of
        the mesh, such as one with devices in another order.
    """
    annotations = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target in _MANUAL:
                raise ValueError("--partitioner=shardy does not support manual regions. Use gspmd")
            if target == "Sharding":
                annotations.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for annotation in annotations:
        _make_constraint(annotation, mesh)


def _make_constraint(annotation: ir.Operation, mesh: Mesh) -> None:
    operand = annotation.operands[0]
    rank = ir.RankedTensorType(operand.type).rank
    text = ir.StringAttr(annotation.attributes["mhlo.sharding"]).value
    attribute = _attribute(_split_of(text, rank, mesh), mesh)
    with ir.InsertionPoint(annotation), annotation.location:
        constraint = ir.Operation.create(
            "sdy.sharding_constraint",
            results=[operand.type],
            operands=[operand],
            attributes={"sharding": attribute},
        )
    annotation.results[0].replace_all_uses_with(constraint.results[0])
    annotation.erase()


def _attribute(split: Split, mesh: Mesh) -> ir.Attribute:
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.axes)
    dimensions = ", ".join("{" + ", ".join(f'"{a}"' for a in axes) + "}" for axes in split)
    return ir.Attribute.parse(f"#sdy.sharding<mesh<[{axes}]>, [{dimensions}]>")


def _split_of(text: str, rank: int, mesh: Mesh) -> Split:
    """Returns the split over the mesh's axes that the text of an HLO sharding describes."""
    if text == "{replicated}":
        return ((),) * rank
    match = _TILED.fullmatch(text)
    if match:
        tiles = _numbers(match["tiles"])
        sizes = tiles[:-1] if match["copies"] else tiles
        for split in _candidates(tuple(sizes), mesh):
            if np.array_equal(_device_sets(_devices(match, tiles), len(sizes)), _sets(split, mesh)):
                return split
    raise ValueError(
        f"--partitioner=shardy: the annotation {text} is no split over --mesh={mesh}. Use gspmd"
    )


def _candidates(sizes: tuple[int, ...], mesh: Mesh) -> Iterator[Split]:
    """Yields each assignment of axes to dimensions that splits dimension i into sizes[i] parts."""
    choices = [
        [
            axes
            for count in range(len(mesh.names) + 1)
            for axes in itertools.permutations(mesh.names, count)
            if math.prod(mesh.axis_size(axis) for axis in axes) == size
        ]
        for size in sizes
    ]
    for split in itertools.product(*choices):
        used = [axis for axes in split for axis in axes]
        if len(set(used)) == len(used):
            yield split


def _devices(match: re.Match, tiles: list[int]) -> np.ndarray:
    if match["list"]:
        return np.array(_numbers(match["list"])).reshape(tiles)
    ids = np.arange(math.prod(tiles)).reshape(_numbers(match["iota"]))
    if match["permutation"]:
        ids = ids.transpose(_numbers(match["permutation"]))
    return ids.reshape(tiles)


def _sets(split: Split, mesh: Mesh) -> np.ndarray:
    used = [axis for axes in split for axis in axes]
    order = used + [axis for axis in mesh.names if axis not in used]
    parts = [math.prod(mesh.axis_size(axis) for axis in axes) for axes in split]
    ids = mesh.ids.transpose([mesh.names.index(axis) for axis in order])
    return _device_sets(ids.reshape([*parts, -1]), len(parts))


def _device_sets(devices: np.ndarray, rank: int) -> np.ndarray:
    """Returns the devices of each tile, with replicas of a tile in ascending order."""
    return np.sort(devices.reshape([*devices.shape[:rank], -1]), axis=-1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
