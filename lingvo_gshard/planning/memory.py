"""Bytes of one device by what they are for, and the largest results that a program makes."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.hlo import names as hlo_names
from lingvo_gshard.hlo.shapes import Shape, numpy_name
from lingvo_gshard.hlo.text import Instruction, Module
from lingvo_gshard.runtime.program.program import Program, bytes_of

WEIGHTS, MOMENTS, INPUTS = "weights", "moments", "inputs"
_LISTED = 20
# What makes no array of its own, or one that is a part of the program.
_VIEWS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
_VIEWS += ("while", "conditional", "call")


def by_class(
    program: Program, classes: Sequence[str], memory: dict[str, int], module: Module
) -> dict[str, int]:
    """Returns bytes of one device: weights, moments, inputs, activations, program and their peak.

    classes: of each input. memory: as the compiler gives it. Inputs take what they take in the
    compiler's layout, their padding included; activations are all temporaries, gradients among
    them, and outputs that took over no input's memory.
    """
    sizes = _input_bytes(program, module)
    found = {
        kind: sum(size for size, of in zip(sizes, classes, strict=True) if of == kind)
        for kind in (WEIGHTS, MOMENTS, INPUTS)
    }
    # What the compiler counts beyond the arrays: their alignment.
    found[INPUTS] += max(memory["arguments"] - sum(sizes), 0)
    found["activations"] = memory["temporaries"] + memory["outputs"]
    found["program"] = memory["code"]
    return {**found, "peak": memory["peak"]}


def largest_results(module: Module, layers: frozenset[str] | None) -> list[dict]:
    """Returns the largest arrays that operations make in memory: name, layer, shape, type, bytes.

    Not all of them are there at the same time.
    """
    rows = {}
    for computation in module.computations.values():
        if computation.is_fused:
            continue
        for instruction in computation.instructions:
            if instruction.opcode in _VIEWS:
                continue
            for shape in instruction.shape.arrays:
                row = _row(instruction, shape, layers)
                if not shape.space:
                    rows[row["layer"], row["shape"], row["dtype"]] = row
    ordered = sorted(rows.values(), key=lambda row: -row["bytes"])[:_LISTED]
    return [{**row, "shape": list(row["shape"])} for row in ordered]


def _row(instruction: Instruction, shape: Shape, layers: frozenset[str] | None) -> dict:
    name = hlo_names.operation_name(instruction.operation_name)
    return {
        "name": instruction.name,
        "layer": hlo_names.split_operation_name(name, layers)[0],
        "shape": shape.dimensions,
        "dtype": numpy_name(shape.dtype),
        "bytes": int(shape.bytes * shape.padding),
    }


def _input_bytes(program: Program, module: Module) -> list[int]:
    """Bytes of each input on one device, as laid out where the compiled program says how."""
    parameters = module.entry.parameters
    if len(parameters) != len(program.inputs):
        return [bytes_of(array, program.mesh) for array in program.inputs]
    return [int(p.shape.bytes * p.shape.padding) for p in parameters]
