"""Finds why a step moves data: the line, and the annotation, behind each collective."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import msgspec

from lingvo_gshard import hlo
from lingvo_gshard.hlo.module import Instruction, Module
from lingvo_gshard.hlo.names import operation_name
from lingvo_gshard.runtime.propagation.propagated import Annotated, Chosen, Traced, chosen
from lingvo_gshard.sharding.mesh import Mesh

# Sums over devices are part of what a product computes; these only move data.
_MOVING = ("all-gather", "all-to-all", "collective-permute", "ragged-all-to-all")


class Resharding(msgspec.Struct, frozen=True):
    """A tensor that devices exchange because its sharding changes.

    Attributes:
      kind: HLO's opcode of the collective, such as "all-gather".
      axes: mesh axes along which it communicates; empty if its groups do not follow axes.
      layer: path of the layer; "" if it belongs to none.
      phase: one of hlo.PHASES.
      count_per_step: number of such collectives in a step.
      bytes_per_step: bytes that they move on each device in a step.
      operation: TensorFlow's type of the operation whose result or operand moves.
      source: the line of the operation; "" if it is unknown.
      before: the tensor's sharding; "" if it is unknown.
      after: the sharding that it must have; "" if it is unknown.
      layout: letters of the annotation that asks for `after`; "" if none does.
      annotated_at: the line of this annotation; "" if no annotation asks.
    """

    kind: str
    axes: tuple[str, ...]
    layer: str
    phase: str
    count_per_step: int
    bytes_per_step: int
    operation: str
    source: str
    before: str = ""
    after: str = ""
    layout: str = ""
    annotated_at: str = ""


def reshardings(
    calls: Iterable[hlo.CollectiveCall], module: Module, traced: Traced, mesh: Mesh
) -> list[Resharding]:
    """Returns the collectives of a step that only move data, with their causes; largest first.

    Args:
      calls: the collectives of the compiled step.
      module: the program before it was partitioned, with shardings.
      traced: the operations of the function.
      mesh: the mesh.
    """
    causes = _Causes(module, traced, mesh)
    groups: dict[tuple, list[hlo.CollectiveCall]] = collections.defaultdict(list)
    for call in calls:
        if call.kind in _MOVING:
            groups[call.kind, call.axes, call.op_name].append(call)
    rows = [
        Resharding(
            kind=kind,
            axes=axes,
            layer=traced.layer(name)[0],
            phase=traced.layer(name)[1],
            count_per_step=sum(call.times for call in group),
            bytes_per_step=sum(call.times * call.bytes for call in group),
            operation=traced.kind(name),
            source=traced.lines.line(name),
            **causes.of(name),
        )
        for (kind, axes, name), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes_per_step)


@dataclasses.dataclass(frozen=True)
class _Change:
    """A tensor that one instruction has in one sharding, and another one needs in another.

    Attributes:
      before: the sharding that it has, its dimensions in the order of the one that needs it.
      after: the sharding that is needed.
      reader: the instruction that needs it.
    """

    before: Chosen
    after: Chosen
    reader: Instruction


class _Causes:
    """Finds where the sharding of a tensor changes."""

    def __init__(self, module: Module, traced: Traced, mesh: Mesh):
        self._traced, self._mesh = traced, mesh
        self._named: dict[str, list[Instruction]] = collections.defaultdict(list)
        for computation in module.computations:
            for instruction in computation.instructions:
                self._named[operation_name(instruction.op_name)].append(instruction)

    def of(self, name: str) -> dict[str, str]:
        """Returns `before`, `after` and the annotation of an operation whose tensor moves.

        A change from the operation's result to an annotation that reads it comes first, and then
        a change of its operands.
        """
        found = [change for each in self._named.get(name, ()) for change in self._changes(each)]
        if not found:
            return {}
        change = found[0]
        annotation = self._annotation(change.reader) if change.reader.opcode != "dot" else None
        layout = annotation.layout if annotation else ""
        same_rank = len(layout) == len(change.before.tiles)
        return {
            "before": change.before.in_words(layout if same_rank else ""),
            "after": change.after.in_words(layout),
            "layout": layout,
            "annotated_at": annotation.source if annotation else "",
        }

    def _changes(self, instruction: Instruction) -> list[_Change]:
        copies = [u for u in instruction.computation.users[instruction] if u.opcode == "copy"]
        pairs = [(instruction, copy) for copy in copies]
        pairs += [(operand, instruction) for operand in instruction.operands]
        return [change for pair in pairs if (change := self._change(*pair))]

    def _change(self, source: Instruction, reader: Instruction) -> _Change | None:
        """Returns the change of a tensor from the one that computes it to one that reads it."""
        before, after = chosen(source, self._mesh), chosen(reader, self._mesh)
        if before is None or after is None:
            return None
        if reader.opcode == "dot":
            return self._change_for_product(source, before, reader)
        if reader.opcode == "transpose":
            before = _in_order(before, reader.proto.dimensions)
        elif reader.opcode == "reshape":
            # The correspondence of the parts of merged dimensions depends on the order.
            return _Change(before, after, reader) if before.parts != after.parts else None
        elif source.shape.dimensions != reader.shape.dimensions:
            return None
        return _Change(before, after, reader) if before != after else None

    def _change_for_product(
        self, source: Instruction, before: Chosen, dot: Instruction
    ) -> _Change | None:
        """Returns the change of an operand that is split where the other is whole."""
        numbers = dot.proto.dot_dimension_numbers
        contracted = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
        index = dot.operands.index(source)
        other = chosen(dot.operands[1 - index], self._mesh)
        if other is None or before.split is None:
            return None
        split = list(before.split)
        for mine, theirs in zip(contracted[index], contracted[1 - index], strict=True):
            if other.tiles[theirs] == 1:
                split[mine] = ()
        tiles = [parts if axes else 1 for parts, axes in zip(before.tiles, split, strict=True)]
        after = Chosen(tuple(tiles), tuple(split))
        return _Change(before, after, dot) if before != after else None

    def _annotation(self, instruction: Instruction) -> Annotated | None:
        """Returns the annotation of a tensor: its own, or of a copy that has its sharding."""
        own = chosen(instruction, self._mesh)
        assert own is not None
        users = instruction.computation.users[instruction]
        same = [u for u in users if u.opcode == "copy" and chosen(u, self._mesh) == own]
        names = [operation_name(each.op_name) for each in (instruction, *same)]
        found = (self._traced.annotation(name, own) for name in names)
        return next(filter(None, found), None)


def _in_order(sharding: Chosen, order: Sequence[int]) -> Chosen:
    """Returns the sharding of a tensor whose dimensions are transposed."""
    split = sharding.split and tuple(sharding.split[i] for i in order)
    return Chosen(tuple(sharding.tiles[i] for i in order), split)
