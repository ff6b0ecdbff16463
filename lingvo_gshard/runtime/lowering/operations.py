"""Reads the operations of a StableHLO module, and their annotations for GSPMD.

TensorFlow writes annotations as `custom_call @Sharding` with numbered devices. They have the format
of HloSharding::ToString in XLA's xla/hlo/ir/hlo_sharding.cc.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from lingvo_gshard.core.lazy import ir
from lingvo_gshard.sharding.mesh import Mesh

CUSTOM_CALL = "stablehlo.custom_call"
# Targets of the calls at the start and at the end of a manual region.
ENTERS_REGION, LEAVES_REGION = "SPMDFullToShardShape", "SPMDShardToFullShape"
SHARDING = "mhlo.sharding"
_TARGET, _ANNOTATION = "call_target_name", "Sharding"
# The attribute of an annotation that lists its open dimensions, and the name of the list.
_CONFIG, _OPEN = "backend_config", "unspecified_dims"


def operations_of(module: ir.Module | ir.Operation) -> list[ir.Operation]:
    """Returns the operations within a module or an operation, inner ones before outer ones."""
    found: list[ir.Operation] = []
    # Read once: for each operation it would take three times as long as the walk.
    advance = ir.WalkResult.ADVANCE

    def visit(each: ir.Operation) -> ir.WalkResult:
        found.append(each)
        return advance

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


def open_dimensions_of(annotation: ir.Operation) -> list[int]:
    """Returns the dimensions of an annotation whose split is left to the partitioner."""
    if _CONFIG not in annotation.attributes:
        return []
    found = re.fullmatch(rf"{_OPEN}=\[([\d,]+)\]", str(annotation.attributes[_CONFIG]).strip('"'))
    return _numbers(found[1]) if found else []


def annotated(value: ir.Value, text: str, open_dimensions: Sequence[int] = ()) -> ir.Value:
    """Returns a value with an annotation, which is added at the current insertion point.

    Args:
      text: the sharding, as HLO writes it.
      open_dimensions: the dimensions whose split is left to the partitioner.
    """
    attributes: dict[str, ir.Attribute] = {
        _TARGET: ir.StringAttr.get(_ANNOTATION),
        SHARDING: ir.StringAttr.get(text),
    }
    if open_dimensions:
        listed = ",".join(map(str, open_dimensions))
        attributes[_CONFIG] = ir.StringAttr.get(f"{_OPEN}=[{listed}]")
    call = ir.Operation.create(CUSTOM_CALL, [value.type], [value], attributes)
    return call.results[0]


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


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
