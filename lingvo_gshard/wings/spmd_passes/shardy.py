"""Rewrites a module's GSPMD annotations as Shardy constraints over the mesh's named axes.

TensorFlow writes annotations for GSPMD: `custom_call @Sharding` with numbered devices. XLA falls
back to GSPMD for such modules. See https://openxla.org/shardy/sharding_representation.
"""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import Layer, UserError
from lingvo_gshard.core.lazy import ir
from lingvo_gshard.runtime import (
    ENTERS_REGION,
    LEAVES_REGION,
    PARTITIONERS,
    annotation_of,
    call_target,
    open_dimensions_of,
    operations_of,
)
from lingvo_gshard.sharding import Mesh, Split
from lingvo_gshard.wings.spmd_passes.sharding_text import split_of_text

_REFUSAL = (
    "`partitioner=shardy` cannot partition manual regions: TensorFlow has no operations for "
    "Shardy's. Use `partitioner=gspmd`"
)


@PARTITIONERS.register("shardy")
class Shardy:
    """Annotations for XLA's partitioner Shardy."""

    @staticmethod
    def check(model: Layer, mesh: Mesh) -> None:
        """Raises UserError if a layer has manual regions on the mesh."""
        for layer in model.all_layers() if mesh.size > 1 else ():
            if layer.has_manual_regions:
                raise UserError(f"{layer.path} computes in manual regions, and {_REFUSAL}")

    @staticmethod
    def rewrite(module: ir.Module, mesh: Mesh) -> None:
        """Rewrites the module's annotations in place.

        Raises:
          UserError: the module has a manual region, or an annotation that is not a split over axes
            of the mesh, such as one with devices in another order.
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
    attribute = _attribute(split, open_dimensions_of(annotation), mesh)
    with ir.InsertionPoint(annotation), annotation.location:
        constraint = ir.Operation.create(
            "sdy.sharding_constraint",
            results=[operand.type],
            operands=[operand],
            attributes={"sharding": attribute},
        )
    annotation.results[0].replace_all_uses_with(constraint.results[0])
    annotation.erase()


def _attribute(split: Split, open_dimensions: Sequence[int], mesh: Mesh) -> ir.Attribute:
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.axes)
    entries = [[*(f'"{a}"' for a in axes)] for axes in split]
    for dimension in open_dimensions:
        entries[dimension].append("?")
    dimensions = ", ".join("{" + ", ".join(entry) + "}" for entry in entries)
    return ir.Attribute.parse(f"#sdy.sharding<mesh<[{axes}]>, [{dimensions}]>")
