"""Trip counts of loops: as the compiler states them, or by evaluating the loop's counters.

Compilers do not always state how often a loop runs. The loop of a gradient runs as often as a
counter from the forward loop says. Small arrays of integers are therefore evaluated, lazily, as the
program would compute them. A value that depends on an input, or is no small array of integers, is
unknown: None.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.wings.hlo.module import Computation, Instruction, Shape

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
_ELEMENTWISE = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "negate": np.negative,
    "select": np.where,
    "clamp": lambda low, value, high: np.minimum(np.maximum(value, low), high),
    "convert": lambda value: value,
}
_IDENTITY = ("bitcast", "reshape", "copy", "copy-start", "copy-done", "optimization-barrier")

# An array, a tuple as a function from an element's index to its value, or None.
Value = np.ndarray | Callable[[int], "Value"] | None


def constant_of(instruction: Instruction) -> np.ndarray | None:
    """Returns the integers of a constant of any size, or of a copy of one; None for all others."""
    while instruction.opcode in _IDENTITY and len(instruction.operands) == 1:
        (instruction,) = instruction.operands
    if instruction.opcode != "constant" or instruction.shape.dtype not in _TYPES:
        return None
    value = _constant(instruction.proto.literal, instruction.shape)
    return value if isinstance(value, np.ndarray) else None


def is_small(shape: Shape) -> bool:
    """Returns whether an array of this shape is small enough to be evaluated."""
    return shape.dtype in _TYPES and shape.size <= LARGEST_ARRAY


class Values:
    """The values of a computation's instructions, for given arguments.

    Args:
      arguments: one function for each parameter, which returns its value.
      while_value: returns the value of a loop, given the loop and the values around it.
    """

    def __init__(
        self,
        computation: Computation,
        arguments: Sequence[Callable[[], Value]],
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

    def within(self, called: Computation, *operands: Instruction) -> Values:
        """Returns the values of a computation that this one calls with these operands."""
        return self.given(called, *(functools.partial(self.of, each) for each in operands))

    def given(self, called: Computation, *arguments: Callable[[], Value]) -> Values:
        """Returns the values of a computation that this one calls with these arguments."""
        return Values(called, arguments, self._while_value)

    def _compute(self, instruction: Instruction) -> Value:
        opcode, proto = instruction.opcode, instruction.proto
        if opcode == "parameter":
            number = proto.parameter_number
            return self._arguments[number]() if number < len(self._arguments) else None
        if opcode == "tuple":
            return lambda index: self.of(instruction.operands[index])
        if opcode == "get-tuple-element":
            source = self.of(instruction.operands[0])
            return source(proto.tuple_index) if callable(source) else None
        if opcode in _IDENTITY and instruction.shape.elements is not None:
            return self.of(instruction.operands[0])
        if opcode in ("fusion", "call"):
            (called,) = instruction.called
            return self.within(called, *instruction.operands).root()
        if opcode == "while":
            return self._while_value(instruction, self)
        if not is_small(instruction.shape):
            return None
        if opcode == "constant":
            return _constant(proto.literal, instruction.shape)
        values = [self.of(operand) for operand in instruction.operands]
        operands = [value for value in values if isinstance(value, np.ndarray)]
        if len(operands) < len(values):
            return None
        with np.errstate(all="ignore"):
            value = _result(instruction, operands)
        dtype = _TYPES[instruction.shape.dtype]
        return None if value is None else np.asarray(value).astype(dtype)


def _evaluated_first(instruction: Instruction) -> list[Instruction]:
    """The operands to evaluate before an instruction."""
    if not is_small(instruction.shape):
        return []
    return [operand for operand in instruction.operands if is_small(operand.shape)]


def _constant(literal: Any, shape: Shape) -> Value:
    dtype = np.dtype(_TYPES[shape.dtype])
    stored = getattr(literal, f"{shape.dtype}s")
    array = np.frombuffer(stored, dtype) if isinstance(stored, bytes) else np.array(stored, dtype)
    return array.reshape(shape.dimensions) if array.size == shape.size else None


def _result(instruction: Instruction, operands: list[np.ndarray]) -> Value:
    """The result of an elementwise or slicing operation."""
    opcode, dimensions, proto = instruction.opcode, instruction.shape.dimensions, instruction.proto
    if opcode in _ELEMENTWISE:
        return _ELEMENTWISE[opcode](*operands)
    if opcode == "compare":
        return _COMPARE[proto.comparison_direction](*operands)
    if opcode in _IDENTITY:
        return operands[0].reshape(dimensions)
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


# This many iterations are evaluated one by one. Later ones are extrapolated.
STEPS = 256
# Results of a loop with a known trip count are evaluated one by one for this many iterations.
_RESULT_STEPS = 16 * STEPS
# A loop that would run longer counts as unknown.
MOST_ITERATIONS = 2**40

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def values_of_entry(entry: Computation) -> Values:
    """Returns the values of a program's entry computation. Its inputs are unknown."""

    def while_value(instruction: Instruction, values: Values) -> Value:
        loop = Loop(instruction, values)
        return loop.returned if instruction.shape.elements is not None else loop.returned(0)

    return Values(entry, (), while_value)


class Loop:
    """A while instruction, with the values of the computation that contains it."""

    def __init__(self, instruction: Instruction, values: Values):
        self.body, self._condition = instruction.called
        self._values = values
        self._initial = values.of(instruction.operands[0])
        self._is_tuple = instruction.shape.elements is not None
        self._stated = _TRIP_COUNT.search(instruction.backend_config)

    @functools.cached_property
    def trip_count(self) -> int | None:
        """The number of iterations; None if it depends on unknown values."""
        return int(self._stated[1]) if self._stated else self._count()

    @functools.cached_property
    def _counters(self) -> set[int]:
        """The elements of the state that the condition depends on."""
        return self._dependencies(_elements_used(self._condition.root))

    def first_iteration(self) -> Values:
        """Returns the values of the body's instructions in the first iteration."""
        return self._values.given(self.body, lambda: self._initial)

    def returned(self, index: int) -> Value:
        """Returns an element of the loop's result; element 0 is the result if it is one array."""
        made_by = self._next(index)
        if made_by is None:
            return None
        if _is_passed_on(made_by, index):
            return self._initial(index) if callable(self._initial) else self._initial
        if self.trip_count is None or not is_small(made_by.shape):
            return None
        needed = self._dependencies({index})
        if self.trip_count <= _RESULT_STEPS:
            state = self._start(needed)
            for _ in range(self.trip_count):
                state = self._step(state, needed)
            return state.get(index)
        return self._extrapolated(self._start(needed), needed, self.trip_count).get(index)

    def _count(self) -> int | None:
        state = self._start(self._counters)
        for iteration in range(STEPS):
            goes_on = self._goes_on(state)
            if not goes_on:
                return None if goes_on is None else iteration
            state = self._step(state, self._counters)
        return self._search()

    def _search(self) -> int | None:
        """Finds the trip count by bisection, if all counters move by constant steps."""
        start = self._start(self._counters)

        def goes_on(iteration: int) -> bool | None:
            return self._goes_on(self._extrapolated(start, self._counters, iteration))

        low, high = STEPS - 1, 2 * STEPS
        while goes_on(high):
            low, high = high, 2 * high
            if high > MOST_ITERATIONS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if goes_on(middle) else (low, middle)
        return high if goes_on(low) and goes_on(high) is False else None

    def _extrapolated(self, start: dict, needed: set[int], iterations: int) -> dict[int, Value]:
        """The state after some iterations, if each changes its elements by the same step."""
        second = self._step(start, needed)
        third = self._step(second, needed)
        return {i: _extrapolated(start[i], second[i], third[i], iterations) for i in needed}

    def _start(self, needed: set[int]) -> dict[int, Value]:
        if not self._is_tuple:
            return {0: self._initial}
        initial = self._initial if callable(self._initial) else lambda index: None
        return {index: initial(index) for index in needed}

    def _step(self, state: dict, needed: set[int]) -> dict[int, Value]:
        values = self._values.given(self.body, lambda: self._argument(state))
        computed = ((index, self._next(index)) for index in needed)
        return {index: values.of(made) for index, made in computed if made is not None}

    def _goes_on(self, state: dict) -> bool | None:
        """Whether the loop runs another iteration from a state; None if that is unknown."""
        answer = self._values.given(self._condition, lambda: self._argument(state)).root()
        return bool(answer) if isinstance(answer, np.ndarray) else None

    def _argument(self, state: dict) -> Value:
        return state.get if self._is_tuple else state.get(0)

    def _next(self, index: int) -> Instruction | None:
        """The instruction that computes an element of the next iteration's state."""
        root = self.body.root
        if not self._is_tuple:
            return root
        return root.operands[index] if root.opcode == "tuple" else None

    def _dependencies(self, elements: set[int]) -> set[int]:
        """These elements of the state and all elements that they are computed from."""
        found: set[int] = set()
        pending = list(elements)
        while pending:
            index = pending.pop()
            made = self._next(index)
            if index not in found and made is not None:
                found.add(index)
                pending += _elements_used(made)
        return found


def _elements_used(instruction: Instruction) -> set[int]:
    """The elements of its computation's parameter that a value is computed from."""
    found, seen, pending = set(), set(), [instruction]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.opcode == "parameter":
            found.add(0)
        elif current.opcode == "get-tuple-element":
            source = current.operands[0]
            if source.opcode == "parameter":
                found.add(current.proto.tuple_index)
            else:
                pending.append(source)
        elif current.shape.elements is not None or is_small(current.shape):
            pending += current.operands
    return found


def _is_passed_on(instruction: Instruction, index: int) -> bool:
    """Whether an iteration leaves an element of the state as it is."""
    while instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        instruction = instruction.operands[0]
    if instruction.opcode == "parameter":
        return True
    return (
        instruction.opcode == "get-tuple-element"
        and instruction.operands[0].opcode == "parameter"
        and instruction.proto.tuple_index == index
    )


def _extrapolated(first: Value, second: Value, third: Value, iterations: int) -> Value:
    """The value after some equal steps from `first`; None if steps differ or it overflows."""
    if not (isinstance(first, np.ndarray) and isinstance(second, np.ndarray)):
        return None
    if not isinstance(third, np.ndarray):
        return None
    if first.dtype == np.bool_:
        return first if np.array_equal(first, second) and np.array_equal(second, third) else None
    begin, limits = first.astype(np.int64), np.iinfo(first.dtype)
    step = second.astype(np.int64) - begin
    exact = begin + step * iterations
    fits = np.all(exact >= limits.min) and np.all(exact <= limits.max)
    is_steady = np.array_equal(third.astype(np.int64) - second, step)
    return np.asarray(exact.astype(first.dtype)) if fits and is_steady else None
