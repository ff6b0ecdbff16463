"""Integers that a program computes and that can be known beforehand: counters of loops, and bounds.

Compilers do not always say how often a loop runs, and a gradient's loop runs as often as a counter
says that the forward one returned. So small arrays of integers are computed, lazily, as the program
would; what depends on an input, or is no such array, is unknown: None.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from lingvo_gshard.hlo.shapes import Shape
from lingvo_gshard.hlo.text import Computation, Instruction

LARGEST_ARRAY = 2**12

_TYPES = {
    "pred": np.bool_,
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}
_COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_SAME = ("bitcast", "reshape", "copy", "copy-start", "copy-done", "optimization-barrier")
_NUMBER = re.compile(r"true|false|-?\d+")

# An array, a tuple as a function of the element's index, or None.
Value = np.ndarray | Callable[[int], "Value"] | None


def is_small(shape: Shape) -> bool:
    """Whether an array of this shape would be computed."""
    return shape.dtype in _TYPES and shape.size <= LARGEST_ARRAY


class Values:
    """What the instructions of a computation return, given its arguments.

    arguments: one value for each parameter. while_value: (instruction, values) -> what a loop
    returns.
    """

    def __init__(
        self,
        computation: Computation,
        arguments: list[Value],
        while_value: Callable[[Instruction, Values], Value],
    ):
        self.computation = computation
        self._arguments = arguments
        self._while_value = while_value
        self._known: dict[str, Value] = {}

    def root(self) -> Value:
        """What the computation returns."""
        return self.of(self.computation.root)

    def of(self, instruction: Instruction) -> Value:
        """What one instruction returns."""
        waiting = [instruction]
        while waiting:
            last = waiting[-1]
            before = () if last.name in self._known else _computed_before(last)
            unknown = [operand for operand in before if operand.name not in self._known]
            waiting += unknown
            if not unknown:
                waiting.pop()
                if last.name not in self._known:
                    self._known[last.name] = self._compute(last)
        return self._known[instruction.name]

    def within(self, called: Computation, arguments: list[Value]) -> Values:
        """Values of a computation that this one calls."""
        return Values(called, arguments, self._while_value)

    def _compute(self, instruction: Instruction) -> Value:
        opcode = instruction.opcode
        if opcode == "parameter":
            number = int(instruction.literal)
            return self._arguments[number] if number < len(self._arguments) else None
        if opcode == "tuple":
            return lambda index: self.of(instruction.operands[index])
        if opcode == "get-tuple-element":
            source = self.of(instruction.operands[0])
            return source(int(instruction.attributes["index"])) if callable(source) else None
        if opcode in _SAME and instruction.shape.elements is not None:
            return self.of(instruction.operands[0])
        if opcode in ("fusion", "call"):
            (called,) = instruction.called("calls", "to_apply")
            arguments = [_later(self, operand) for operand in instruction.operands]
            return _LazyValues(self, called, arguments).root()
        if opcode == "while":
            return self._while_value(instruction, self)
        if instruction.shape.elements is not None or not is_small(instruction.shape):
            return None
        if opcode == "constant":
            return _constant(instruction)
        operands = [self.of(operand) for operand in instruction.operands]
        if any(value is None or callable(value) for value in operands):
            return None
        with np.errstate(all="ignore"):
            value = _result(instruction, operands)
        dtype = _TYPES[instruction.shape.dtype]
        return None if value is None else np.asarray(value).astype(dtype)


class _LazyValues(Values):
    """Values whose arguments are computed when a parameter is asked for."""

    def __init__(self, caller: Values, computation: Computation, arguments: list[Callable]):
        super().__init__(computation, [], caller._while_value)
        self._later = arguments

    def _compute(self, instruction: Instruction) -> Value:
        if instruction.opcode == "parameter":
            return self._later[int(instruction.literal)]()
        return super()._compute(instruction)


def _computed_before(instruction: Instruction) -> list[Instruction]:
    """The operands to compute first, so that long chains of operations are no deep recursion."""
    if instruction.shape.elements is not None or not is_small(instruction.shape):
        return []
    return [operand for operand in instruction.operands if is_small(operand.shape)]


def _later(values: Values, instruction: Instruction) -> Callable[[], Value]:
    return lambda: values.of(instruction)


def _constant(instruction: Instruction) -> Value:
    if "..." in instruction.literal:
        return None
    numbers = [
        text == "true" if text in ("true", "false") else int(text)
        for text in _NUMBER.findall(instruction.literal)
    ]
    if len(numbers) != instruction.shape.size:
        return None
    dtype = _TYPES[instruction.shape.dtype]
    return np.array(numbers).astype(dtype).reshape(instruction.shape.dimensions)


def _result(instruction: Instruction, operands: list[np.ndarray]) -> Value:
    """What an elementwise or slicing operation returns for these operands."""
    opcode, dimensions = instruction.opcode, instruction.shape.dimensions
    if opcode in _BINARY:
        return _BINARY[opcode](*operands)
    if opcode == "compare":
        return _COMPARE[instruction.attributes["direction"]](*operands)
    if opcode in _SAME:
        return operands[0].reshape(dimensions)
    if opcode == "convert":
        return operands[0]
    if opcode == "negate":
        return -operands[0]
    if opcode == "not":
        return ~operands[0]
    if opcode == "select":
        return np.where(*operands)
    if opcode == "clamp":
        low, value, high = operands
        return np.minimum(np.maximum(value, low), high)
    if opcode == "broadcast":
        return _broadcast(instruction, operands[0])
    if opcode == "slice":
        return operands[0][_slices(instruction.attributes["slice"])]
    if opcode == "dynamic-slice":
        return operands[0][_at(operands[0].shape, dimensions, operands[1:])]
    if opcode == "dynamic-update-slice":
        result = operands[0].copy()
        result[_at(result.shape, operands[1].shape, operands[2:])] = operands[1]
        return result
    if opcode == "custom-call" and "AllocateBuffer" in instruction.rest:
        return np.zeros(dimensions)
    return None


def _broadcast(instruction: Instruction, operand: np.ndarray) -> np.ndarray:
    shape = [1] * len(instruction.shape.dimensions)
    indices = instruction.attributes["dimensions"].strip("{}").split(",")
    for index, size in zip(filter(None, indices), operand.shape, strict=True):
        shape[int(index)] = size
    return np.broadcast_to(operand.reshape(shape), instruction.shape.dimensions)


def _slices(text: str) -> tuple[slice, ...]:
    parts = re.findall(r"\[([\d:]+)\]", text)
    return tuple(slice(*(int(number) for number in part.split(":"))) for part in parts)


def _at(whole: tuple, part: tuple, starts: list[np.ndarray]) -> tuple[slice, ...]:
    """Where a dynamic slice lies; a start too far on is moved back, as XLA does."""
    found = []
    for size, length, start in zip(whole, part, starts, strict=True):
        begin = min(max(int(start), 0), size - length)
        found.append(slice(begin, begin + length))
    return tuple(found)
