"""Rewrites a module's GSPMD annotations as Shardy constraints over the mesh's named axes.

TensorFlow writes annotations for GSPMD: `custom_call @Sharding` with numbered devices. XLA falls
back to GSPMD for such modules. See https://openxla.org/shardy/sharding_representation.
"""

from __future__ import annotations

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.lazy import ir
from lingvo_gshard.runtime.lowering.annotations import (
    ENTERS_REGION,
    LEAVES_REGION,
    annotation_of,
    call_target,
    split_of_text,
)
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Split

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
    annotations, regions = [], []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if call_target(operation) in (ENTERS_REGION, LEAVES_REGION):
            regions.append(operation)
        if annotation_of(operation):
            annotations.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    if regions:
        raise UserError(_REFUSAL)
    for annotation in annotations:
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
    attribute = _attribute(split, mesh)
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
