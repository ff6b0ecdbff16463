"""Makes the weights that a model decodes with from its trained ones.

To have both at once would take twice the memory. So large models are prepared in groups: trained
weights and what is computed from them alone, such as one matrix of all stacked layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_gshard.core import Device, NestedMap, jax
from lingvo_gshard.core.lazy import ir, jnp, mlir, stablehlo
from lingvo_gshard.runtime import (
    Array,
    Program,
    bytes_of,
    can_be_kept,
    maker_of,
    platform_of,
    using_partitioner,
    without_cache,
)
from lingvo_gshard.wings.inference.programs.executables import PREPARE, Executables, ProgramKey

# Bytes of the trained weights on a device below which one program makes all.
_LARGE = 2**28


def prepared_weights(
    executables: Executables, theta: NestedMap, is_last: bool = False
) -> tuple[tuple[Array, ...], list[jax.Array]]:
    """Returns the decoding weights of a model: their names and layouts, and the arrays.

    Args:
      theta: the trained weights, NumPy arrays or jax.Arrays.
      is_last: whether this is the last use of `theta`, whose jax.Arrays may be deleted.
    """
    values = [x if isinstance(x, jax.Array) else np.asarray(x) for x in theta.flatten()]
    program = executables.program(ProgramKey(PREPARE))
    made: dict[int, jax.Array] = {}
    for group in groups_of(program):
        call = _compiled(program, group, executables.devices)
        given = [values[index] for index in group.inputs]
        made |= zip(group.outputs, jax.block_until_ready(call(*given)), strict=True)
        for value in given if is_last else []:
            if isinstance(value, jax.Array):
                value.delete()
    return program.outputs, [made[index] for index in range(len(program.outputs))]


class Group(NamedTuple):
    """Indices of a program's inputs, and of the outputs that are computed from them."""

    inputs: list[int]
    outputs: list[int]


def groups_of(program: Program) -> list[Group]:
    """Returns the groups that depend on each other, the largest first; a small program is one."""
    found: list[Group] = []
    sizes = [bytes_of(array, program.mesh) for array in program.inputs]
    if sum(sizes) < _LARGE:
        return [Group(list(range(len(sizes))), list(range(len(program.outputs))))]
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, program.module)
        *_, end = ir.SymbolTable(module.operation)["main"].regions[0].blocks[0].operations
        for output, value in enumerate(end.operands):
            inputs, outputs = _arguments(value), [output]
            for group in [group for group in found if inputs.intersection(group.inputs)]:
                found.remove(group)
                inputs, outputs = inputs.union(group.inputs), [*group.outputs, *outputs]
            found.append(Group(sorted(inputs), outputs))
    return sorted(found, key=lambda group: -sum(sizes[index] for index in group.inputs))


def peak_bytes(program: Program) -> int:
    """Returns the most bytes that a device has while groups are prepared one after the other.

    Over a mesh it begins with all trained weights. One device gets them a group at a time.
    """
    inputs, made, peak = program.inputs if program.mesh.size > 1 else (), 0, 0
    trained = sum(bytes_of(array, program.mesh) for array in inputs)
    for group in groups_of(program):
        given = sum(bytes_of(program.inputs[index], program.mesh) for index in group.inputs)
        made += sum(bytes_of(program.outputs[index], program.mesh) for index in group.outputs)
        peak = max(peak, made + (trained or given))
        trained -= given if trained else 0
    return peak


def _arguments(value: ir.Value) -> set[int]:
    """Returns the arguments of the function that a value is computed from, by index."""
    found, seen, pending = set(), set(), [value]
    while pending:
        one = pending.pop()
        if one not in seen:
            seen.add(one)
            maker = maker_of(one)
            pending += [] if maker is None else maker.operands
            found |= {ir.BlockArgument(one).arg_number} if maker is None else set()
    return found


def _compiled(program: Program, group: Group, devices: Sequence[Device]) -> Any:
    """Compiles the part of a program that computes a group."""
    mesh = jax.sharding.Mesh(program.mesh.arrange(devices), program.mesh.names)
    whole = program.exported(platform_of(devices[0])).call

    def part(*given: jax.Array) -> list[jax.Array]:
        known = dict(zip(group.inputs, given, strict=True))
        # The compiler removes what no output is computed from.
        arrays = enumerate(array.struct for array in program.inputs)
        found = whole(*(known.get(i, jnp.zeros(x.shape, x.dtype)) for i, x in arrays))
        return [found[index] for index in group.outputs]

    shardings = [program.outputs[index].sharding(mesh) for index in group.outputs]
    arguments = [program.inputs[index].sharded_struct(mesh) for index in group.inputs]
    cache = contextlib.nullcontext() if can_be_kept(devices) else without_cache()
    with cache, using_partitioner(program.partitioner), jax.enable_x64(True):
        return jax.jit(part, out_shardings=shardings).lower(*arguments).compile()
