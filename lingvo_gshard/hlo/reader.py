"""Reading compiled HLO: the operations of one device, with loops multiplied in.

The text is read, not XLA's protocol buffer: both compilers give both, but jax has no public reader
of the latter, and TensorFlow's own is private and of another version than jax's compilers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import jax

from lingvo_gshard.hlo import collectives as hlo_collectives
from lingvo_gshard.hlo import demand, traffic
from lingvo_gshard.hlo import flops as hlo_flops
from lingvo_gshard.hlo import names as hlo_names
from lingvo_gshard.hlo.loops import Loop, values_of_entry
from lingvo_gshard.hlo.operation import CollectiveCall, Operation
from lingvo_gshard.hlo.origins import Origins
from lingvo_gshard.hlo.shapes import numpy_name
from lingvo_gshard.hlo.summary import KINDS
from lingvo_gshard.hlo.text import Computation, Instruction, parse_module
from lingvo_gshard.hlo.values import Values
from lingvo_gshard.sharding.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class OperationList:
    """What one device executes in one step, in the program's order; and what is not known of it."""

    operations: list[Operation]
    notes: list[str]


def read_operations(
    compiled: jax.stages.Compiled, mesh: Mesh, layers: Iterable[str] | None = None
) -> OperationList:
    """Returns the operations of a compiled program; see `operations_of_text`."""
    return operations_of_text(compiled.as_text(), mesh, layers)


def operations_of_text(text: str, mesh: Mesh, layers: Iterable[str] | None = None) -> OperationList:
    """Returns the operations in HLO text of one device's program.

    layers: scopes of all layers, core.layer.scope_name of their paths; without them an operation's
    layer is taken from the form of its name. Of a conditional the branch with more operations
    counts. A loop that runs no one knows how often counts once, and is noted. Arithmetic on single
    numbers is left out.

    Raises ValueError if the text cannot be read.
    """
    module = parse_module(text)
    reader = _Reader(mesh, None if layers is None else frozenset(filter(None, layers)))
    operations = list(reader.operations(module.entry, values_of_entry(module.entry), 1))
    return OperationList(operations, reader.notes)


class _Reader:
    def __init__(self, mesh: Mesh, layers: frozenset[str] | None):
        self._mesh = mesh
        self._layers = layers
        self._origins = Origins(layers)
        self.notes: list[str] = []

    def operations(
        self, computation: Computation, values: Values, times: int
    ) -> Iterator[Operation]:
        """What a computation that is run so many times does, with what it calls."""
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                yield from self._loop(instruction, values, times)
            elif instruction.opcode == "conditional":
                yield from self._conditional(instruction, values, times)
            elif instruction.opcode == "call":
                (called,) = instruction.called("to_apply", "calls")
                arguments = [values.of(operand) for operand in instruction.operands]
                yield from self.operations(called, values.within(called, arguments), times)
            elif not (traffic.is_free(instruction) or _is_of_scalars(instruction)):
                yield from self._instruction(instruction, times)

    def _loop(self, instruction: Instruction, values: Values, times: int) -> Iterator[Operation]:
        loop = Loop(instruction, values)
        count = loop.trip_count
        if count is None:
            name = hlo_names.operation_name(instruction.operation_name)
            self.notes.append(
                f"how often loop {instruction.name} ({name}) runs depends on data; it counts once"
            )
            count = 1
        if count:
            yield from self.operations(loop.body, loop.first_iteration(), times * count)

    def _conditional(
        self, instruction: Instruction, values: Values, times: int
    ) -> Iterator[Operation]:
        branches = instruction.called(
            "branch_computations", "true_computation", "false_computation"
        )
        found = []
        for branch, operand in zip(branches, instruction.operands[1:], strict=True):
            arguments = [values.of(operand)]
            found.append(list(self.operations(branch, values.within(branch, arguments), times)))
        yield from max(found, key=_amount)

    def _instruction(self, instruction: Instruction, times: int) -> Iterator[Operation]:
        parts = _parts(instruction)
        matmuls = sorted(
            (part for part, _ in parts if hlo_flops.is_matmul(part)),
            key=hlo_flops.matmul_flops,
            reverse=True,
        )
        collectives = hlo_collectives.collectives(instruction, self._mesh)
        name = self._origins.name(instruction, parts, matmuls)
        layer, phase = hlo_names.split_operation_name(name, self._layers)
        yield Operation(
            name=instruction.name,
            opcode=hlo_collectives.base_opcode(instruction),
            layer=layer,
            phase=phase,
            times=times,
            matmul_flops=sum(hlo_flops.matmul_flops(part) for part in matmuls),
            other_flops=sum(hlo_flops.other_flops(part, count) for part, count in parts),
            dtype=numpy_name(matmuls[0].operands[0].shape.dtype) if matmuls else "",
            passes=hlo_flops.passes(matmuls[0]) if matmuls else 1,
            bytes=traffic.memory_bytes(instruction),
            collective=collectives[0][1] if collectives else None,
            dispatch=self._origins.is_dispatch(instruction, name, matmuls),
        )
        for inner, call in collectives[1:]:
            yield self._further_collective(inner, call, name, times)

    def _further_collective(
        self, inner: Instruction, call: CollectiveCall, name: str, times: int
    ) -> Operation:
        """One of several collectives in a fusion; the first stands with the fusion."""
        name = hlo_names.operation_name(inner.operation_name) or name
        layer, phase = hlo_names.split_operation_name(name, self._layers)
        return Operation(inner.name, call.kind, layer, phase, times, collective=call)


def _is_of_scalars(instruction: Instruction) -> bool:
    """Whether it is arithmetic on single numbers, which a scalar unit does beside all else."""
    if hlo_collectives.base_opcode(instruction) in KINDS:
        return False
    values = [instruction, *instruction.operands]
    return all(array.size <= 1 for value in values for array in value.shape.arrays)


def _parts(instruction: Instruction) -> list[tuple[Instruction, int]]:
    """The instructions that it stands for, with how many elements are made of each."""
    if instruction.opcode in ("fusion", "fusion-start", "async-start"):
        return [part for called in instruction.called("calls") for part in demand.demand(called)]
    return [(instruction, instruction.shape.size)]


def _amount(operations: list[Operation]) -> tuple[int, int]:
    """How much is done: products first, then traffic and the rest."""
    return (
        sum(operation.times * operation.matmul_flops for operation in operations),
        sum(
            operation.times * (operation.bytes + operation.other_flops) for operation in operations
        ),
    )
