"""Reads the operations that one device executes in a step, with the trip counts of their loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from lingvo_gshard.core import scopes
from lingvo_gshard.sharding import Mesh
from lingvo_gshard.wings.hlo import collectives as hlo_collectives
from lingvo_gshard.wings.hlo import costs, demand
from lingvo_gshard.wings.hlo import names as hlo_names
from lingvo_gshard.wings.hlo.asynchronous import CollectivesInFlight
from lingvo_gshard.wings.hlo.host_transfers import host_transfer
from lingvo_gshard.wings.hlo.kernels import Kernels
from lingvo_gshard.wings.hlo.loops import Loop, Values, values_of_entry
from lingvo_gshard.wings.hlo.module import Computation, Instruction, Module, numpy_name
from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.hlo.origins import Origins
from lingvo_gshard.wings.hlo.tpu_slices import ONE_SLICE, Slices


@dataclasses.dataclass(frozen=True)
class OperationList:
    """The operations that one device executes in one step.

    Attributes:
      operations: in the program's order. An operation in a loop is listed once, with the number
        of its executions.
      notes: what the program does not tell, such as loops whose trip count depends on data.
    """

    operations: list[Operation]
    notes: list[str]


def read_operations(
    module: Module,
    mesh: Mesh,
    layers: Iterable[str] | None = None,
    slices: Slices = ONE_SLICE,
    with_unused: bool = False,
    kernel_flops: Mapping[str, float] | None = None,
) -> OperationList:
    """Returns the operations of one device's program.

    Of a conditional, the branch that does the most work counts. A loop with an unknown trip count
    counts with the iterations in its name (layers/stacks/execution.py), or else as one iteration. A
    note says so. Arithmetic on scalars is left out.

    Args:
      mesh: the mesh that the program was partitioned for, which names the axes of collectives.
      layers: name scopes of all layers, as core.layer.scope_name returns them. By default, the
        layer of an operation is guessed from its name.
      slices: the TPU slices that the program runs on.
      with_unused: whether to list the operations of loops that usually have no iterations, with 0
        executions.
      kernel_flops: regular expression for the names of kernels of other libraries -> FLOPs of one
        call on one device.

    Raises:
      UserError: `kernel_flops` is for a kernel that the program does not have.
    """
    known = None if layers is None else frozenset(filter(None, layers))
    kernels = Kernels(kernel_flops)
    reader = _Reader(mesh, known, slices, with_unused, kernels)
    operations = list(reader.operations(module.entry, values_of_entry(module.entry), 1))
    notes = [*reader.notes, *kernels.notes(), *_notes_on_unused(reader.unused)]
    return OperationList(operations, notes)


class _Reader:
    """Reads the operations of one program, and notes what it does not tell."""

    def __init__(
        self,
        mesh: Mesh,
        layers: frozenset[str] | None,
        slices: Slices,
        with_unused: bool,
        kernels: Kernels,
    ):
        self._kernels = kernels
        self._mesh = mesh
        self._with_unused = with_unused
        self._slices = slices
        self._layers = layers
        self._origins = Origins(layers)
        self.notes: list[str] = []
        self.unused: list[str] = []

    def operations(
        self, computation: Computation, values: Values, times: int, around: tuple[str, ...] = ()
    ) -> Iterator[Operation]:
        """Yields the operations of a computation that runs `times` times, and of all it calls.

        The collectives named in `around` are under way while it runs.
        """
        flight = CollectivesInFlight(computation, around)
        for instruction in computation.instructions:
            in_flight = flight.during(instruction)
            if instruction.opcode == "while":
                yield from self._loop(instruction, values, times, in_flight)
            elif instruction.opcode == "conditional":
                yield from self._conditional(instruction, values, times, in_flight)
            elif instruction.opcode == "call":
                (called,) = instruction.called
                within = values.within(called, *instruction.operands)
                yield from self.operations(called, within, times, in_flight)
            elif not (costs.is_free(instruction) or _is_scalar(instruction)):
                found = list(self._instruction(instruction, values, times, in_flight))
                started = [each.name for each in found if each.collective or each.host]
                flight.start(instruction, started)
                yield from found

    def _loop(
        self, instruction: Instruction, values: Values, times: int, in_flight: tuple[str, ...]
    ) -> Iterator[Operation]:
        loop = Loop(instruction, values)
        count = loop.trip_count
        if count is None:
            name = hlo_names.operation_name(instruction.op_name)
            count = scopes.trips_of(instruction.op_name)
            if count == 0:
                self.unused.append(name)
            else:
                self.notes.append(_unknown_trips(instruction.name, name, count))
            count = 1 if count is None else count
        if count or self._with_unused:
            first = loop.first_iteration()
            yield from self.operations(loop.body, first, times * count, in_flight)

    def _conditional(
        self, instruction: Instruction, values: Values, times: int, in_flight: tuple[str, ...]
    ) -> Iterator[Operation]:
        found = []
        for branch, operand in zip(instruction.called, instruction.operands[1:], strict=True):
            within = values.within(branch, operand)
            found.append(list(self.operations(branch, within, times, in_flight)))
        yield from max(found, key=_work)

    def _instruction(
        self, instruction: Instruction, values: Values, times: int, in_flight: tuple[str, ...]
    ) -> Iterator[Operation]:
        parts = _parts(instruction)
        kernel = self._kernels.of_instruction(instruction, values, times)
        matmuls = sorted(
            (part for part, _ in parts if costs.is_matmul(part)),
            key=costs.matmul_flops,
            reverse=True,
        )
        collectives = hlo_collectives.collectives(instruction, self._mesh, self._slices)
        name = self._origins.name(instruction, parts, matmuls)
        layer, phase = hlo_names.layer_and_phase(name, self._layers)
        dtype = costs.product_dtype(matmuls[0]) if matmuls else kernel.dtype if kernel else ""
        flops = sum(costs.matmul_flops(part) for part in matmuls)
        yield Operation(
            name=instruction.name,
            opcode=instruction.base_opcode,
            layer=layer,
            phase=phase,
            times=times,
            matmul_flops=flops + ((kernel.flops or 0) if kernel else 0),
            other_flops=sum(costs.other_flops(part, count) for part, count in parts),
            dtype=numpy_name(dtype),
            passes=costs.passes(matmuls[0]) if matmuls else 1,
            bytes=costs.memory_bytes(instruction),
            collective=collectives[0][1] if collectives else None,
            dispatch=self._origins.is_dispatch(instruction, name, matmuls),
            op_name=name,
            attention=kernel.attention if kernel else costs.fused_attention(instruction),
            is_grouped=costs.is_grouped_products(instruction),
            host=host_transfer(instruction),
            in_flight=in_flight,
        )
        for inner, collective in collectives[1:]:
            yield self._further_collective(inner, collective, name, times)

    def _further_collective(
        self, inner: Instruction, collective: Collective, name: str, times: int
    ) -> Operation:
        """The second or a later collective of a fusion; the first is the fusion's own."""
        name = hlo_names.operation_name(inner.op_name) or name
        layer, phase = hlo_names.layer_and_phase(name, self._layers)
        return Operation(
            name=inner.name,
            opcode=collective.kind,
            layer=layer,
            phase=phase,
            times=times,
            collective=collective,
            op_name=name,
        )


def _is_scalar(instruction: Instruction) -> bool:
    """Whether it is arithmetic on scalars, which takes no time next to arrays."""
    if hlo_collectives.is_collective(instruction):
        return False
    values = [instruction, *instruction.operands]
    return all(array.size <= 1 for value in values for array in value.shape.arrays)


def _parts(instruction: Instruction) -> list[tuple[Instruction, int]]:
    """The instructions that an operation consists of, with the elements computed of each."""
    if instruction.opcode in ("fusion", "async-start"):
        return [part for called in instruction.called for part in demand.demand(called)]
    return [(instruction, instruction.shape.size)]


def _work(operations: list[Operation]) -> tuple[int, int]:
    """The work of a branch, to compare branches: matrix products first, then all else."""
    return (
        sum(operation.times * operation.matmul_flops for operation in operations),
        sum(
            operation.times * (operation.bytes + operation.other_flops) for operation in operations
        ),
    )


def _unknown_trips(loop: str, name: str, expected: int | None) -> str:
    """Returns the note on a loop whose trip count depends on data."""
    counts = "one iteration" if expected is None else f"{expected} iterations, as is usual"
    return f"the trip count of loop {loop} ({name}) depends on data; the loop counts as {counts}"


def _notes_on_unused(loops: list[str]) -> list[str]:
    """Returns the note on loops that usually have no iterations, by the names of the loops."""
    if not loops:
        return []
    more = f" and {len(loops) - 1} more" if len(loops) > 1 else ""
    return [
        f"loops that usually have no iterations, such as those for rows over a bound, count as "
        f"none: {loops[0]}{more}"
    ]
