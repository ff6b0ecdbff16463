"""A traced step, and the shardings that XLA's propagation has chosen for its tensors."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import tempfile
from collections.abc import Iterable, Sequence

import msgspec

from lingvo_gshard import hlo
from lingvo_gshard.core.layer import scope_name
from lingvo_gshard.core.lazy import Device
from lingvo_gshard.core.tracing.graph_lines import GraphLines
from lingvo_gshard.hlo.module import Instruction
from lingvo_gshard.hlo.names import layer_and_phase
from lingvo_gshard.layers.stacks.pipeline_loop import STAGES
from lingvo_gshard.runtime.program.compilation_cache import without_cache
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.recording import Recorded
from lingvo_gshard.sharding.strategies import Split

# XLA's names of the passes that choose shardings, for GSPMD and for Shardy.
_PASSES = ("sharding-propagation", "shardy-xla")


def compile_with_shardings(
    program: Program, devices: Sequence[Device]
) -> tuple[Executable, hlo.Module | None]:
    """Compiles a program for as many devices as its mesh has.

    Returns:
      The executable, and the program before it was partitioned: its shapes are those of whole
      tensors, and its instructions have the shardings that annotations and XLA have chosen. None
      if nothing is partitioned, or if the compiler does not write what it decides.
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
        """Returns the division as text, such as "B over data, H over model" or "whole".

        Args:
          layout: letters of the dimensions; by default they are numbered from 0.
        """
        if self.split is not None:
            return split_in_words(self.split, layout)
        pairs = zip(_names(layout, len(self.tiles)), self.tiles, strict=True)
        return ", ".join(f"{name} in {parts}" for name, parts in pairs if parts > 1) or WHOLE


def split_in_words(split: Split, layout: str = "") -> str:
    """Returns a split as text, such as "B over data, H over model" or "whole".

    Args:
      split: mesh axes of each dimension.
      layout: letters of the dimensions; by default they are numbered from 0.
    """
    pairs = zip(_names(layout, len(split)), split, strict=True)
    return ", ".join(f"{name} over {' and '.join(axes)}" for name, axes in pairs if axes) or WHOLE


def _names(layout: str, rank: int) -> list[str]:
    letters = layout or "_" * rank
    return [f"dimension {i}" if letter == "_" else letter for i, letter in enumerate(letters)]


def chosen(instruction: Instruction, mesh: Mesh) -> Chosen | None:
    """Returns the sharding of an instruction's array.

    Returns:
      The sharding. None for tuples, for tensors of one device, and in manual regions, where each
      device has a tensor of its own.
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
        """Returns what it asks for as text, such as "B over data" or "whole"."""
        return "other parts" if self.split is None else split_in_words(self.split, self.layout)


class Traced:
    """The operations of a traced function by name.

    Args:
      recorded: the annotations and graphs that were recorded when the function was traced.
      paths: paths of the task's layers, in the order in which they are listed.
      mesh: the mesh of the annotations.

    Attributes:
      lines: the lines that made the operations.
    """

    def __init__(self, recorded: Recorded, paths: Iterable[str], mesh: Mesh):
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
          name: the operation's name.
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
