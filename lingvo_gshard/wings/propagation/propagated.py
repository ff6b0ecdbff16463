"""A traced step, and the shardings that XLA's propagation has chosen for its tensors."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import pathlib
import tempfile
from collections.abc import Iterable, Sequence

import msgspec

from lingvo_gshard.core import Device, scope_name
from lingvo_gshard.runtime import Executable, Program, without_cache
from lingvo_gshard.sharding import Mesh, Split, recording, xla
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.hlo.module import Instruction, Module
from lingvo_gshard.wings.hlo.names import layer_and_phase, operation_name
from lingvo_gshard.wings.pipeline.pipeline_loop import STAGES
from lingvo_gshard.wings.tracing.source_lines import GraphLines

# XLA's names of the passes that choose shardings, for GSPMD and for Shardy.
_PASSES = ("sharding-propagation", "shardy-xla")


def compile_with_shardings(
    program: Program, devices: Sequence[Device]
) -> tuple[Executable, hlo.Module | None]:
    """Compiles a program for as many devices as its mesh has.

    Returns:
      The executable, and the program before partitioning. Shapes in this program are shapes of
      whole tensors. Its instructions carry the shardings that annotations and XLA have chosen. The
      program is None if nothing is partitioned, or if the compiler does not write its decisions.
    """
    # A cached program is not compiled, so nothing would be written.
    with tempfile.TemporaryDirectory() as directory, without_cache():
        options = {
            "xla_dump_to": directory,
            "xla_dump_hlo_as_proto": True,
            "xla_dump_hlo_pass_re": "|".join(_PASSES),
        }
        executable = Executable(program, devices, options)
        found = [
            path for name in _PASSES for path in pathlib.Path(directory).glob(f"*.after_{name}*.pb")
        ]
        content = max(found).read_bytes() if found else None
    if content is None:
        return executable, None
    return executable, hlo.Module.from_hlo(content)


WHOLE = "whole"


class Chosen(msgspec.Struct, frozen=True):
    """The division of a tensor.

    Attributes:
      tiles: number of parts of each dimension.
      split: mesh axes of each dimension; None if no axes can express it.
    """

    tiles: tuple[int, ...]
    split: Split | None

    @property
    def parts(self) -> int:
        """Number of different parts; 1 means that every device holds all."""
        return math.prod(self.tiles)

    def bytes_on_device(self, shape: Sequence[int], itemsize: int) -> int:
        """Returns the bytes of the largest part of a tensor of this shape."""
        pairs = zip(shape, self.tiles, strict=True)
        return itemsize * math.prod(-(-size // parts) for size, parts in pairs)

    def in_words(self, layout: str = "") -> str:
        """Returns the division as text; see `split_in_words`."""
        if self.split is not None:
            return split_in_words(self.split, layout)
        pairs = zip(_names(layout, len(self.tiles)), self.tiles, strict=True)
        return ", ".join(f"{name} in {parts}" for name, parts in pairs if parts > 1) or WHOLE


def split_in_words(split: Split, layout: str = "") -> str:
    """Returns a split as text, such as "B over data, H over model" or "whole".

    Args:
      layout: letters of the dimensions; by default they are numbered from 0.
    """
    pairs = zip(_names(layout, len(split)), split, strict=True)
    return ", ".join(f"{name} over {' and '.join(axes)}" for name, axes in pairs if axes) or WHOLE


def _names(layout: str, rank: int) -> list[str]:
    letters = layout or "_" * rank
    return [f"dimension {i}" if letter == "_" else letter for i, letter in enumerate(letters)]


def chosen(instruction: Instruction, mesh: Mesh) -> Chosen | None:
    """Returns the sharding of an instruction's array.

    It is None for tuples, for tensors of one device, and in manual regions, where each device has
    a tensor of its own.
    """
    if instruction.shape.elements is not None:
        return None
    rank = len(instruction.shape.dimensions)
    if not instruction.proto.HasField("sharding"):
        # The partitioner replicates what propagation has left open.
        return Chosen((1,) * rank, ((),) * rank)
    return _read(instruction.proto.sharding.SerializeToString(), rank, mesh)


@functools.lru_cache(maxsize=2**12)
def _read(serialized: bytes, rank: int, mesh: Mesh) -> Chosen | None:
    tiles = xla.tiles_of(serialized, rank)
    return None if tiles is None else Chosen(tiles, xla.split_of(serialized, rank, mesh))


_ANNOTATION = "XlaSharding"


@dataclasses.dataclass(frozen=True)
class Annotated:
    """An annotation in a traced function.

    Attributes:
      layout: its letters; "" if it was made without letters.
      split: the mesh axes of each dimension that it asks for; None if no axes can express it.
      source: the line that annotates; "" if it is unknown.
    """

    layout: str
    split: Split | None
    source: str

    def in_words(self) -> str:
        """Returns the split that is asked for, such as "B over data" or "whole"."""
        return "other parts" if self.split is None else split_in_words(self.split, self.layout)


class Traced:
    """The operations of a traced function by name.

    Args:
      recorded: the annotations and graphs that were recorded when the function was traced.
      paths: paths of the task's layers. Tensors are listed in the order of these paths.
    """

    def __init__(self, recorded: recording.Recorded, paths: Iterable[str], mesh: Mesh):
        self.lines = GraphLines(recorded.graphs)
        # Operations of a loop's body may have the names of others outside of it.
        self._layouts = {
            id(event.result.op): event.equation.partition("->")[2]
            for event in recorded.events
            if event.is_annotation
        }
        self._paths = {scope_name(path): path for path in paths if path}
        self._scopes = frozenset(self._paths)
        self._order = {path: position for position, path in enumerate(["", *self._paths.values()])}
        self._mesh = mesh

    def layer(self, name: str) -> tuple[str, str]:
        """Returns the path of an operation's layer, "" if it has none, and its phase."""
        scope, phase = layer_and_phase(name, self._scopes)
        return self._paths.get(scope, ""), phase

    def kind(self, name: str) -> str:
        """Returns TensorFlow's type of an operation, such as "MatMul"; "" if it is unknown."""
        operation = self.lines.operation(name)
        return operation.type if operation else ""

    def annotation(self, name: str, division: Chosen) -> Annotated | None:
        """Returns the annotation of this name; None if the operation is another one.

        Args:
          division: the sharding of its result in the program.
        """
        operation = self.lines.operation(name)
        if operation is None or operation.type != _ANNOTATION:
            return None
        rank = operation.outputs[0].shape.rank
        split = xla.split_of(operation.get_attr("sharding"), rank, self._mesh)
        layout = self._layouts.get(id(operation), "")
        if rank == len(division.tiles) - 1:
            # The code of one pipeline stage is traced; the program has all stages at once.
            layout = layout and f"{STAGES}{layout}"
            split = split and division.split and (division.split[0], *split)
        elif rank != len(division.tiles):
            return None
        return Annotated(layout, split, self.lines.line(name))

    def position(self, layer: str, name: str) -> tuple[int, int]:
        """Returns a key that sorts operations by layer, and within one by the time of tracing."""
        operation = self.lines.operation(name)
        order = self.lines.order
        return self._order.get(layer, 0), order[operation.name] if operation else len(order)


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
      module: the program before it was partitioned, with shardings.
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
class _Resharding:
    """A tensor that one instruction has in one sharding, and another one needs in another.

    Attributes:
      before: the tensor's sharding, with the dimensions in the reader's order.
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

    def _changes(self, instruction: Instruction) -> list[_Resharding]:
        copies = [u for u in instruction.computation.users[instruction] if u.opcode == "copy"]
        pairs = [(instruction, copy) for copy in copies]
        pairs += [(operand, instruction) for operand in instruction.operands]
        return [change for pair in pairs if (change := self._change(*pair))]

    def _change(self, source: Instruction, reader: Instruction) -> _Resharding | None:
        """Returns how a tensor is resharded between the instruction `source` and a reader."""
        before, after = chosen(source, self._mesh), chosen(reader, self._mesh)
        if before is None or after is None:
            return None
        if reader.opcode == "dot":
            return self._change_for_product(source, before, reader)
        if reader.opcode == "transpose":
            before = _in_order(before, reader.proto.dimensions)
        elif reader.opcode == "reshape":
            # The correspondence of the parts of merged dimensions depends on the order.
            return _Resharding(before, after, reader) if before.parts != after.parts else None
        elif source.shape.dimensions != reader.shape.dimensions:
            return None
        return _Resharding(before, after, reader) if before != after else None

    def _change_for_product(
        self, source: Instruction, before: Chosen, dot: Instruction
    ) -> _Resharding | None:
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
        return _Resharding(before, after, dot) if before != after else None

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
