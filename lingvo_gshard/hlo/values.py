"""Evaluates the integers of a program that are known at compile time, such as loop counters.

Compilers do not always state how often a loop runs, and the loop of a gradient runs as often as a
counter says that the forward loop returned. So small arrays of integers are evaluated, lazily, as
the program would compute them. A value that depends on an input, or is no small array of integers,
is unknown: None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lingvo_gshard.hlo.module import Computation, Instruction
from lingvo_gshard.hlo.shapes import Shape

# Larger arrays are not evaluated.
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
_IDENTITY = ("bitcast", "reshape", "copy", "copy-start", "copy-done", "optimization-barrier")

# An array, a tuple as a function from an element's index to its value, or None.
Value = np.ndarray | Callable[[int], "Value"] | None


def is_small(shape: Shape) -> bool:
    """Returns whether an array of this shape is small enough to be evaluated."""
    return shape.dtype in _TYPES and shape.size <= LARGEST_ARRAY


class Values:
    """The values of a computation's instructions, for given arguments.

    Args:
      computation: the computation to evaluate.
      arguments: one value for each parameter.
      while_value: returns the value of a loop, given the loop and the values around it.
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
        self._known: dict[Instruction, Value] = {}

    def root(self) -> Value:
        """Returns the computation's result."""
        return self.of(self.computation.root)

    def of(self, instruction: Instruction) -> Value:
        """Returns the value of one instruction."""
        # A stack in place of recursion, because chains of operations can be long.
        pending = [instruction]
        while pending:
            last = pending[-1]
            needed = () if last in self._known else _evaluated_first(last)
            unknown = [operand for operand in needed if operand not in self._known]
            pending += unknown
            if not unknown:
                pending.pop()
                if last not in self._known:
                    self._known[last] = self._compute(last)
        return self._known[instruction]

    def within(self, called: Computation, arguments: list[Value]) -> Values:
        """Returns the values of a computation that this one calls."""
        return Values(called, arguments, self._while_value)

    def _compute(self, instruction: Instruction) -> Value:
        opcode, proto = instruction.opcode, instruction.proto
        if opcode == "parameter":
            number = proto.parameter_number
            return self._arguments[number] if number < len(self._arguments) else None
        if opcode == "tuple":
            return lambda index: self.of(instruction.operands[index])
        if opcode == "get-tuple-element":
            source = self.of(instruction.operands[0])
            return source(proto.tuple_index) if callable(source) else None
        if opcode in _IDENTITY and instruction.shape.elements is not None:
            return self.of(instruction.operands[0])
        if opcode in ("fusion", "call"):
            (called,) = instruction.called
            arguments = [_deferred(self, operand) for operand in instruction.operands]
            return _LazyValues(self, called, arguments).root()
        if opcode == "while":
            return self._while_value(instruction, self)
        if not is_small(instruction.shape):
            return None
        if opcode == "constant":
            return _constant(proto.literal, instruction.shape)
        operands = [self.of(operand) for operand in instruction.operands]
        if any(value is None or callable(value) for value in operands):
            return None
        with np.errstate(all="ignore"):
            value = _result(instruction, operands)
        dtype = _TYPES[instruction.shape.dtype]
        return None if value is None else np.asarray(value).astype(dtype)


class _LazyValues(Values):
    """Values whose arguments are evaluated when a parameter is asked for."""

    def __init__(self, caller: Values, computation: Computation, arguments: list[Callable]):
        super().__init__(computation, [], caller._while_value)
        self._deferred = arguments

    def _compute(self, instruction: Instruction) -> Value:
        if instruction.opcode == "parameter":
            return self._deferred[instruction.proto.parameter_number]()
        return super()._compute(instruction)


def _evaluated_first(instruction: Instruction) -> list[Instruction]:
    """The operands to evaluate before an instruction."""
    if not is_small(instruction.shape):
        return []
    return [operand for operand in instruction.operands if is_small(operand.shape)]


def _deferred(values: Values, instruction: Instruction) -> Callable[[], Value]:
    return lambda: values.of(instruction)


def _constant(literal: Any, shape: Shape) -> Value:
    dtype = np.dtype(_TYPES[shape.dtype])
    stored = getattr(literal, f"{shape.dtype}s")
    array = np.frombuffer(stored, dtype) if isinstance(stored, bytes) else np.array(stored, dtype)
    return array.reshape(shape.dimensions) if array.size == shape.size else None


def _result(instruction: Instruction, operands: list[np.ndarray]) -> Value:
    """The result of an elementwise or slicing operation."""
    opcode, dimensions, proto = instruction.opcode, instruction.shape.dimensions, instruction.proto
    if opcode in _BINARY:
        return _BINARY[opcode](*operands)
    if opcode == "compare":
        return _COMPARE[proto.comparison_direction](*operands)
    if opcode in _IDENTITY:
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
        return operands[0][tuple(slice(s.start, s.limit, s.stride) for s in proto.slice_dimensions)]
    if opcode == "dynamic-slice":
        return operands[0][_dynamic_slices(operands[0].shape, dimensions, operands[1:])]
    if opcode == "dynamic-update-slice":
        result = operands[0].copy()
        result[_dynamic_slices(result.shape, operands[1].shape, operands[2:])] = operands[1]
        return result
    if opcode == "custom-call" and proto.custom_call_target == "AllocateBuffer":
        return np.zeros(dimensions)
    return None


def _broadcast(instruction: Instruction, operand: np.ndarray) -> np.ndarray:
    shape = [1] * len(instruction.shape.dimensions)
    for index, size in zip(instruction.proto.dimensions, operand.shape, strict=True):
        shape[index] = size
    return np.broadcast_to(operand.reshape(shape), instruction.shape.dimensions)


def _dynamic_slices(whole: tuple, part: tuple, starts: list[np.ndarray]) -> tuple[slice, ...]:
    """The position of a dynamic slice. XLA moves a start back if the slice would not fit."""
    slices = []
    for size, length, start in zip(whole, part, starts, strict=True):
        begin = min(max(int(start), 0), size - length)
        slices.append(slice(begin, begin + length))
    return tuple(slices)
