"""Trip counts of loops: as the compiler states them, or else by evaluating the loop's counters."""

from __future__ import annotations

import functools
import re

import numpy as np

from lingvo_gshard.hlo.module import Computation, Instruction
from lingvo_gshard.hlo.values import Value, Values, is_small

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

    return Values(entry, [None] * len(entry.parameters), while_value)


class Loop:
    """A while instruction, with the values of the computation that contains it.

    Attributes:
      body: the computation of one iteration.
    """

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
        return self._values.within(self.body, [self._initial])

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
        values = self._values.within(self.body, [self._argument(state)])
        return {i: values.of(self._next(i)) for i in needed if self._next(i) is not None}

    def _goes_on(self, state: dict) -> bool | None:
        """Whether the loop runs another iteration from a state; None if that is unknown."""
        answer = self._values.within(self._condition, [self._argument(state)]).root()
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
            if index not in found and self._next(index) is not None:
                found.add(index)
                pending += _elements_used(self._next(index))
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
    if not all(isinstance(value, np.ndarray) for value in (first, second, third)):
        return None
    if first.dtype == np.bool_:
        return first if np.array_equal(first, second) and np.array_equal(second, third) else None
    begin, limits = first.astype(np.int64), np.iinfo(first.dtype)
    step = second.astype(np.int64) - begin
    exact = begin + step * iterations
    fits = np.all(exact >= limits.min) and np.all(exact <= limits.max)
    is_steady = np.array_equal(third.astype(np.int64) - second, step)
    return exact.astype(first.dtype) if fits and is_steady else None
