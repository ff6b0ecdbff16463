"""Rewrites a module's GSPMD annotations as Shardy constraints over the mesh's named axes.

TensorFlow writes annotations for GSPMD: `custom_call @Sharding` with numbered devices. XLA falls
back to GSPMD for such modules. See https://openxla.org/shardy/sharding_representation.

The annotations have the format of HloSharding::ToString in XLA's xla/hlo/ir/hlo_sharding.cc.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.lazy import ir
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split
from lingvo_gshard.sharding.xla import split_of_tiling

CUSTOM_CALL = "stablehlo.custom_call"
# Targets of the calls at the start and at the end of a manual region.
ENTERS_REGION, LEAVES_REGION = "SPMDFullToShardShape", "SPMDShardToFullShape"
SHARDING = "mhlo.sharding"
_TARGET, _ANNOTATION = "call_target_name", "Sharding"
# The attribute of an annotation that lists its open dimensions, and the name of the list.
_CONFIG, _OPEN = "backend_config", "unspecified_dims"


def operations_of(module: ir.Module | ir.Operation) -> list[ir.Operation]:
    """Returns all operations of a module, or within one; each comes after those inside of it."""
    found: list[ir.Operation] = []

    def visit(each: ir.Operation) -> ir.WalkResult:
        found.append(each.operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def maker_of(value: ir.Value) -> ir.Operation | None:
    """Returns the operation that a value is a result of; None for an argument of a block."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def shape_of(value: ir.Value) -> list[int]:
    """Returns the sizes of a value's dimensions."""
    return list(ir.RankedTensorType(value.type).shape)


def call_target(operation: ir.Operation) -> str:
    """Returns the target of a custom call; "" if the operation is none."""
    if operation.name != CUSTOM_CALL:
        return ""
    return ir.StringAttr(operation.attributes[_TARGET]).value


def annotation_of(operation: ir.Operation) -> str:
    """Returns the text of a sharding annotation; "" if the operation is none."""
    if call_target(operation) != _ANNOTATION:
        return ""
    return ir.StringAttr(operation.attributes[SHARDING]).value


def annotated(value: ir.Value, text: str, open_dimensions: Sequence[int] = ()) -> ir.Value:
    """Returns a value with an annotation, which is added at the current insertion point.

    Args:
      value: the value.
      text: the sharding, as HLO writes it.
      open_dimensions: the dimensions whose split is left to the partitioner.
    """
    attributes: dict[str, ir.Attribute] = {
        _TARGET: ir.StringAttr.get(_ANNOTATION),
        SHARDING: ir.StringAttr.get(text),
    }
    if open_dimensions:
        attributes[_CONFIG] = ir.StringAttr.get(f"{_OPEN}=[{_joined(open_dimensions)}]")
    call = ir.Operation.create(CUSTOM_CALL, [value.type], [value], attributes)
    return call.results[0]


_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\](?:(?P<list>\d[\d,]*)"
    r"|<=\[(?P<iota>[\d,]+)\](?:T\((?P<permutation>[\d,]+)\))?)"
    r"(?P<copies> last_tile_dim_replicate)?\}"
)

_LIST = re.compile(r"(?<=\])\d[\d,]*")


def shorten_shardings(module: ir.Module, mesh: Mesh) -> None:
    """Writes the devices of the module's annotations as iotas, so that no list grows with the mesh.

    TensorFlow lists them.
    """
    short: dict[str, str] = {}
    for operation in operations_of(module):
        if operation.name == CUSTOM_CALL and SHARDING in operation.attributes:
            text = ir.StringAttr(operation.attributes[SHARDING]).value
            if text not in short:
                short[text] = shortened(text, mesh)
            operation.attributes[SHARDING] = ir.StringAttr.get(short[text])


def shortened(text: str, mesh: Mesh) -> str:
    """Returns the text of a sharding with an iota for its list of devices.

    Args:
      text: the sharding, such as "{devices=[2,2]0,2,1,3}".
      mesh: the mesh.

    Returns:
      the same sharding, such as "{devices=[2,2]<=[2,2]T(1,0)}"; the text itself if the list is not
      a transposition of the mesh.
    """
    match = _LIST.search(text)
    devices = _numbers(match[0]) if match else []
    if len(devices) != mesh.size:
        return text
    for order in itertools.permutations(range(len(mesh.shape))):
        if (mesh.ids.transpose(order).reshape(-1) == devices).all():
            axes, moved = (",".join(map(str, numbers)) for numbers in (mesh.shape, order))
            is_in_order = list(order) == sorted(order)
            return _LIST.sub(f"<=[{mesh.size}]" if is_in_order else f"<=[{axes}]T({moved})", text)
    return text


def split_of_text(text: str, rank: int, mesh: Mesh) -> Split | None:
    """Returns the split over a mesh that the text of an HLO sharding describes.

    Args:
      text: the sharding, such as "{devices=[4,1,2]<=[8] last_tile_dim_replicate}".
      rank: the tensor's number of dimensions.
      mesh: the mesh.

    Returns:
      the split; None if the sharding is no split over the mesh's axes.
    """
    if text == "{replicated}":
        return ((),) * rank
    match = _TILED.fullmatch(text)
    tiles = _numbers(match["tiles"]) if match else []
    sizes = tiles[:-1] if match and match["copies"] else tiles
    if match and len(sizes) == rank:
        return split_of_tiling(_devices(match, tiles), rank, mesh)
    return None


def _devices(match: re.Match, tiles: list[int]) -> np.ndarray:
    if match["list"]:
        return np.array(_numbers(match["list"])).reshape(tiles)
    ids = np.arange(math.prod(tiles)).reshape(_numbers(match["iota"]))
    if match["permutation"]:
        ids = ids.transpose(_numbers(match["permutation"]))
    return ids.reshape(tiles)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def text_of_split(split: Split, mesh: Mesh) -> str:
    """Returns the HLO sharding of a split over a mesh. Its length does not depend on the devices.

    Args:
      split: the mesh axes of each dimension.
      mesh: the mesh.
    """
    used = [axis for axes in split for axis in axes]
    rest = [axis for axis in mesh.names if axis not in used]
    copies = mesh.parts(rest)
    if copies == mesh.size:
        return "{replicated}"
    tiles = [*(mesh.parts(axes) for axes in split), *([copies] if copies > 1 else [])]
    order = [mesh.names.index(axis) for axis in (*used, *rest)]
    devices = f"[{_joined(mesh.shape)}]T({_joined(order)})"
    if order == sorted(order):
        devices = f"[{mesh.size}]"
    kept = " last_tile_dim_replicate" if copies > 1 else ""
    return f"{{devices=[{_joined(tiles)}]<={devices}{kept}}}"


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


_REFUSAL = (
    "`partitioner=shardy` cannot partition manual regions: TensorFlow has no operations for "
    "Shardy's. Use `partitioner=gspmd`"
)


def check_layers(model: Layer, mesh: Mesh, partitioner: str) -> None:
    """Checks, before anything is traced, that a partitioner can partition a model.

    Args:
      model: the model.
      mesh: the mesh.
      partitioner: "gspmd" or "shardy".

    Raises:
      UserError: the partitioner is Shardy and a layer has manual regions on the mesh.
    """
    if partitioner != "shardy" or mesh.size == 1:
        return
    for layer in model.all_layers():
        if layer.has_manual_regions:
            raise UserError(f"{layer.path} computes in manual regions, and {_REFUSAL}")


def to_shardy(module: ir.Module, mesh: Mesh) -> None:
    """Rewrites the module's annotations in place.

    Raises:
      UserError: the module has a manual region, or an annotation that is not a split over axes of
        the mesh, such as one with devices in another order.
    """
    operations = operations_of(module)
    if any(call_target(each) in (ENTERS_REGION, LEAVES_REGION) for each in operations):
        raise UserError(_REFUSAL)
    for annotation in [each for each in operations if annotation_of(each)]:
        _make_constraint(annotation, mesh)


def _make_constraint(annotation: ir.Operation, mesh: Mesh) -> None:
    operand = annotation.operands[0]
    rank = ir.RankedTensorType(operand.type).rank
    text = annotation_of(annotation)
    split = split_of_text(text, rank, mesh)
    if split is None:
        raise UserError(
            f"`partitioner=shardy`: the annotation {text} is no split over `mesh={mesh}`. Use gspmd"
        )
    attribute = _attribute(split, _open_dimensions(annotation), mesh)
    with ir.InsertionPoint(annotation), annotation.location:
        constraint = ir.Operation.create(
            "sdy.sharding_constraint",
            results=[operand.type],
            operands=[operand],
            attributes={"sharding": attribute},
        )
    annotation.results[0].replace_all_uses_with(constraint.results[0])
    annotation.erase()


def _open_dimensions(annotation: ir.Operation) -> list[int]:
    if _CONFIG not in annotation.attributes:
        return []
    found = re.fullmatch(rf"{_OPEN}=\[([\d,]+)\]", str(annotation.attributes[_CONFIG]).strip('"'))
    return _numbers(found[1]) if found else []


def _attribute(split: Split, open_dimensions: Sequence[int], mesh: Mesh) -> ir.Attribute:
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.axes)
    entries = [[*(f'"{a}"' for a in axes)] for axes in split]
    for dimension in open_dimensions:
        entries[dimension].append("?")
    dimensions = ", ".join("{" + ", ".join(entry) + "}" for entry in entries)
    return ir.Attribute.parse(f"#sdy.sharding<mesh<[{axes}]>, [{dimensions}]>")
