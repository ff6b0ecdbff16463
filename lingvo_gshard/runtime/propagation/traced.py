"""What was traced: the operations of a step with their lines, and the annotations among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lingvo_gshard.core.layer import scope_name
from lingvo_gshard.core.tracing.graph_lines import GraphLines
from lingvo_gshard.hlo.names import layer_and_phase
from lingvo_gshard.layers.stacks.pipeline_loop import STAGES
from lingvo_gshard.runtime.propagation.chosen import Chosen, split_in_words
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.recording import Recorded
from lingvo_gshard.sharding.strategies import Split

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
