"""How much of each value a program needs: a slice of a large array reads the slice alone.

Goes from what is wanted of a result back to the operands, through fusions, where values exist only
as far as they are used. The rules are those of XLA's HloCostAnalysis,
https://github.com/openxla/xla/blob/main/xla/service/hlo_cost_analysis.cc, in numbers of elements.
"""

from __future__ import annotations

from lingvo_gshard.hlo.text import Computation, Instruction

ASYNC_START, ASYNC_DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"

_SLICING = ("slice", "dynamic-slice", "gather")
_RESHAPING = ("bitcast", "reshape", "convert", "copy", "transpose", "bitcast-convert")
# All of their operands, however little of the result is used.
_WHOLE = ("dot", "convolution", "sort", "custom-call", "while", "conditional", "call", "scatter")


def demand(computation: Computation) -> list[tuple[Instruction, int]]:
    """Returns the instructions of a fusion that does all it is for, with elements used of each.

    Those of fusions within it too; what is not used is left out.
    """
    found: list[tuple[Instruction, int]] = []
    _go_back(computation, computation.root.shape.size, found)
    return found


def operand_demand(instruction: Instruction, wanted: int) -> list[int]:
    """Returns how many elements of each operand it takes to make `wanted` of its result."""
    if instruction.opcode == "fusion":
        (called,) = instruction.called("calls")
        return _go_back(called, wanted, [])
    return _operand_demand(instruction, wanted)


def written(instruction: Instruction) -> int:
    """Returns how many elements of its result it writes: of an update in place, the update."""
    source = _through_reshaping(instruction)
    if source.opcode == "dynamic-update-slice" and _updates_in_place(source):
        return source.operands[1].shape.size
    if source.opcode == "scatter":
        return min(source.shape.size, source.operands[-1].shape.size)
    if source.opcode == "fusion" and source.shape.elements is None:
        (called,) = source.called("calls")
        return written(called.root)
    return instruction.shape.size


def written_of_tuple(element: Instruction) -> int:
    """Returns how many elements a fusion writes of one element of its tuple."""
    return min(written(element), _wanted_of_result(element))


def is_async_collective(computation: Computation) -> bool:
    """Whether a fusion starts, carries on or ends a collective that runs beside other fusions."""
    return any("async_collective_fusion_config" in i.rest for i in computation.instructions)


def starts_async_collective(computation: Computation) -> bool:
    """Whether it is where such a collective starts."""
    return any(f'"{ASYNC_START}"' in i.rest for i in computation.instructions)


def _go_back(computation: Computation, wanted: int, found: list) -> list[int]:
    """Adds what is used within a computation; returns how much of each of its parameters."""
    needed = dict.fromkeys((i.name for i in computation.instructions), 0)
    needed[computation.root.name] = wanted
    for instruction in reversed(computation.instructions):
        count = needed[instruction.name]
        if not count:
            continue
        found.append((instruction, count))
        if instruction.opcode == "fusion":
            (called,) = instruction.called("calls")
            amounts = _go_back(called, count, found)
        elif instruction.opcode == "tuple":
            amounts = [_wanted_of_result(operand) for operand in instruction.operands]
        else:
            amounts = _operand_demand(instruction, count)
        each: dict[str, int] = {}
        for name, amount in zip(instruction.operand_names, amounts, strict=False):
            each[name] = max(each.get(name, 0), amount)
        for name, amount in each.items():
            size = computation.by_name[name].shape.size
            needed[name] = min(size, needed[name] + amount)
    return [needed[parameter.name] for parameter in computation.parameters]


def _wanted_of_result(instruction: Instruction) -> int:
    """How much of an element of a fusion's tuple is made: nothing of what is only passed on."""
    if instruction.opcode == "parameter" or "async_collective_fusion_config" in instruction.rest:
        return 0
    return instruction.shape.size


def _operand_demand(instruction: Instruction, wanted: int) -> list[int]:
    opcode, size = instruction.opcode, instruction.shape.size
    sizes = [operand.shape.size for operand in instruction.operands]
    if opcode in _SLICING:
        return [min(sizes[0], wanted), *sizes[1:]]
    if opcode == "dynamic-update-slice":
        kept = 0 if _updates_in_place(instruction) else max(wanted - sizes[1], 0)
        return [kept, *sizes[1:]]
    if opcode == "scatter":
        return [min(sizes[0], sizes[-1]), *sizes[1:]]
    if opcode in _WHOLE or instruction.shape.elements is not None:
        return sizes
    if opcode in ("reduce", "reduce-window", "concatenate", "select-and-scatter"):
        return [-(-each * wanted // max(size, 1)) for each in sizes]
    if "async_collective_fusion_config" in instruction.rest:
        return [0] * len(sizes)
    return [min(each, wanted) for each in sizes]


def _updates_in_place(update: Instruction) -> bool:
    """Whether what it updates is memory that its result takes over.

    Within a fusion that is a parameter; outside, XLA copies beforehand where it has to.
    """
    updated = _through_reshaping(update.operands[0])
    return updated.opcode == "parameter" or not update.computation.is_fused


def _through_reshaping(instruction: Instruction) -> Instruction:
    """Where its elements come from."""
    while instruction.opcode in _RESHAPING and instruction.operands:
        instruction = instruction.operands[0]
    return instruction
