"""The compiled training step, looked up by the names of its instructions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

from lingvo_gshard import hlo
from lingvo_gshard.hlo import names as hlo_names
from lingvo_gshard.hlo.module import Instruction
from lingvo_gshard.planning.kinds import kind_of
from lingvo_gshard.sharding.mesh import Mesh

_ENCLOSING = ("while", "conditional", "call")
_DONE = "-done"
_NUMBER = re.compile(r"[.\d]+$")


class StepProgram:
    """Finds the operation, layer and kind of an executed instruction.

    Attributes:
      operations: the operations of one device in one step.
    """

    def __init__(
        self,
        module: hlo.Module | None,
        mesh: Mesh,
        layers: frozenset[str],
        kinds: Mapping[str, str | None],
    ):
        """Reads a compiled program.

        Args:
          module: the program; None if it is unknown, which leaves operations without a layer.
          mesh: the mesh that it was partitioned for.
          layers: name scopes of all layers.
          kinds: kinds of layers, as `planning.kinds.kinds_of_layers` returns them.
        """
        self._layers, self._kinds = layers, kinds
        self._instructions: dict[str, Instruction] = {}
        self.operations: list[hlo.Operation] = []
        if module is not None:
            self.operations = hlo.read_operations(module, mesh, layers).operations
            for computation in module.computations:
                self._instructions |= computation.by_name
        self._by_name = {operation.name: operation for operation in self.operations}

    @functools.cache  # noqa: B019
    def find(self, name: str) -> hlo.Operation:
        """Returns the operation of an instruction.

        The end of an asynchronous operation counts as the operation. What the reader of programs
        leaves out, such as arithmetic on scalars, has no work but a layer.
        """
        if name in self._by_name:
            return self._by_name[name]
        instruction = self._instructions.get(name)
        if instruction is None:
            return hlo.Operation(name, _NUMBER.sub("", name), layer="", phase="other")
        if instruction.opcode.endswith(_DONE) and instruction.operands:
            return self.find(instruction.operands[0].name)
        op_name = hlo_names.operation_name(instruction.op_name)
        layer, phase = hlo_names.layer_and_phase(op_name, self._layers)
        return hlo.Operation(name, instruction.opcode, layer, phase, op_name=op_name)

    @functools.cache  # noqa: B019
    def kind(self, name: str) -> str:
        """Returns the kind of an instruction's operation, one of `planning.kinds.KINDS`."""
        return kind_of(self.find(name), self._kinds)

    def enclosing(self, executed: Iterable[str]) -> frozenset[str]:
        """Returns those of the executed instructions that only call others that are executed."""
        names = set(executed)
        return frozenset(
            name
            for name in names
            if (instruction := self._instructions.get(name)) is not None
            and instruction.opcode in _ENCLOSING
            and any(
                inner.name in names
                for called in instruction.called
                for inner in called.instructions
            )
        )
