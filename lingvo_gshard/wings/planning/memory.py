"""Memory of one device by class, and the largest arrays that a program computes."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.runtime import Program, bytes_of
from lingvo_gshard.wings.hlo import names as hlo_names
from lingvo_gshard.wings.hlo.module import Instruction, Module, Shape, numpy_name
from lingvo_gshard.wings.planning.plan.plan import TemporaryRow

WEIGHTS, MOMENTS, INPUTS = "weights", "moments", "inputs"
# `largest_temporaries` returns this many arrays.
_LISTED = 20
# Opcodes whose results are views of other arrays, or belong to the program.
_VIEWS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
_VIEWS += ("while", "conditional", "call")


def bytes_by_class(
    program: Program, classes: Sequence[str], memory: dict[str, int], module: Module
) -> dict[str, int]:
    """Returns the bytes of weights, moments, inputs, activations and program, their peak, and host.

    Inputs count with the padding of the compiler's layout. Activations are all temporaries,
    gradients included, and the outputs that do not reuse an input's memory.

    Args:
      classes: the class of each of its inputs: WEIGHTS, MOMENTS or INPUTS.
      memory: bytes per device, as runtime.program.memory_bytes returns them.
    """
    sizes = _input_bytes(program, module)
    if memory.get("host"):
        pairs = zip(sizes, program.inputs, strict=True)
        sizes = [0 if array.is_on_host else size for size, array in pairs]
    found = {
        name: sum(size for size, each in zip(sizes, classes, strict=True) if each == name)
        for name in (WEIGHTS, MOMENTS, INPUTS)
    }
    # Beyond the arrays, the compiler counts their alignment.
    found[INPUTS] += max(memory["arguments"] - sum(sizes), 0)
    found["activations"] = memory["temporaries"] + memory["outputs"]
    found["program"] = memory["code"]
    return {**found, "peak": memory["peak"], "host": memory.get("host", 0)}


def largest_temporaries(module: Module, layers: frozenset[str] | None) -> list[TemporaryRow]:
    """Returns the largest arrays that operations compute, which need not be live at the same time.

    Of equal arrays of a layer one is listed. Without `layers`, names of operations tell the layer.
    """
    rows = {}
    for computation in module.computations:
        if computation.is_embedded:
            continue
        for instruction in computation.instructions:
            if instruction.opcode in _VIEWS:
                continue
            for shape in instruction.shape.arrays:
                if not shape.space:
                    row = _row(instruction, shape, layers)
                    rows[row.layer, shape.dimensions, row.dtype] = row
    return sorted(rows.values(), key=lambda row: -row.bytes)[:_LISTED]


def _row(instruction: Instruction, shape: Shape, layers: frozenset[str] | None) -> TemporaryRow:
    name = hlo_names.operation_name(instruction.op_name)
    return TemporaryRow(
        name=instruction.name,
        layer=hlo_names.layer_and_phase(name, layers)[0],
        shape=list(shape.dimensions),
        dtype=numpy_name(shape.dtype),
        bytes=int(shape.bytes * shape.padding),
    )


def _input_bytes(program: Program, module: Module) -> list[int]:
    """The bytes of each input on one device, with padding if the compiler kept all inputs."""
    parameters = module.entry.parameters
    if len(parameters) != len(program.inputs):
        return [bytes_of(array, program.mesh) for array in program.inputs]
    return [int(p.shape.bytes * p.shape.padding) for p in parameters]
