"""How often a loop runs: as its compiler says, or else by going through its counters."""

from __future__ import annotations

import functools
import re

import numpy as np

from lingvo_gshard.hlo.text import Computation, Instruction
from lingvo_gshard.hlo.values import Value, Values, is_small

# So many iterations are gone through one by one; further ones are inferred.
STEPS = 256
MOST_ITERATIONS = 2**40

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def values_of_entry(entry: Computation) -> Values:
    """Returns what can be known of the program's integers; of its inputs nothing."""

    def while_value(instruction: Instruction, values: Values) -> Value:
        loop = Loop(instruction, values)
        return loop.returned if instruction.shape.elements is not None else loop.returned(0)

    return Values(entry, [None] * len(entry.parameters), while_value)


class Loop:
    """A while instruction within values: its iterations, and what its state is."""

    def __init__(self, instruction: Instruction, values: Values):
        (self._condition,) = instruction.called("condition")
        (self.body,) = instruction.called("body")
        self._values = values
        self._initial = values.of(instruction.operands[0])
        self._is_tuple = instruction.shape.elements is not None
        self._known = _KNOWN.search(instruction.backend_config)

    @functools.cached_property
    def trip_count(self) -> int | None:
        """How often the body runs; None if it cannot be known."""
        return int(self._known[1]) if self._known else self._count()

    @functools.cached_property
    def _counters(self) -> set[int]:
        """The elements of the state on which the condition depends."""
        return self._dependencies(_elements_used(self._condition.root))

    def first_iteration(self) -> Values:
        """What the body's instructions return the first time."""
        return self._values.within(self.body, [self._initial])

    def returned(self, index: int) -> Value:
        """An element of what the loop returns; element 0 where that is one array."""
        if self._next(index) is None:
            return None
        if _is_passed_on(self._next(index), index):
            return self._initial(index) if callable(self._initial) else self._initial
        if self.trip_count is None or not is_small(self._next(index).shape):
            return None
        needed = self._dependencies({index})
        if self.trip_count <= STEPS * 16:
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
        """The first iteration that is not run, of counters that move by constant steps."""
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
        """The state after so many iterations, if scalars change by the same step in each."""
        second = self._step(start, needed)
        third = self._step(second, needed)
        return {i: _extrapolated(start[i], second[i], third[i], iterations) for i in needed}

    def _start(self, needed: set[int]) -> dict[int, Value]:
        if not self._is_tuple:
            return {0: self._initial}
        known = self._initial if callable(self._initial) else lambda index: None
        return {index: known(index) for index in needed}

    def _step(self, state: dict, needed: set[int]) -> dict[int, Value]:
        values = self._values.within(self.body, [self._argument(state)])
        return {i: values.of(self._next(i)) for i in needed if self._next(i) is not None}

    def _goes_on(self, state: dict) -> bool | None:
        answer = self._values.within(self._condition, [self._argument(state)]).root()
        return bool(answer) if isinstance(answer, np.ndarray) else None

    def _argument(self, state: dict) -> Value:
        return state.get if self._is_tuple else state.get(0)

    def _next(self, index: int) -> Instruction | None:
        """The instruction that makes the next iteration's element."""
        root = self.body.root
        if not self._is_tuple:
            return root
        return root.operands[index] if root.opcode == "tuple" else None

    def _dependencies(self, elements: set[int]) -> set[int]:
        """These elements of the state and all from which they are computed."""
        found: set[int] = set()
        waiting = list(elements)
        while waiting:
            index = waiting.pop()
            if index not in found and self._next(index) is not None:
                found.add(index)
                waiting += _elements_used(self._next(index))
        return found


def _elements_used(instruction: Instruction) -> set[int]:
    """Which elements of its computation's parameter a value is computed from."""
    found, seen, waiting = set(), set(), [instruction]
    while waiting:
        current = waiting.pop()
        if current.name in seen:
            continue
        seen.add(current.name)
        if current.opcode == "parameter":
            found.add(0)
        elif current.opcode == "get-tuple-element":
            source = current.operands[0]
            if source.opcode == "parameter":
                found.add(int(current.attributes["index"]))
            else:
                waiting.append(source)
        elif current.opcode == "tuple" or _may_be_known(current):
            waiting += current.operands
    return found


def _may_be_known(instruction: Instruction) -> bool:
    """Whether it may be known: a small array of integers, or a tuple."""
    shape = instruction.shape
    return shape.elements is not None or is_small(shape)


def _is_passed_on(instruction: Instruction, index: int) -> bool:
    """Whether an element of the next state is that of the last one."""
    while instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        instruction = instruction.operands[0]
    if instruction.opcode == "parameter":
        return True
    return (
        instruction.opcode == "get-tuple-element"
        and instruction.operands[0].opcode == "parameter"
        and int(instruction.attributes["index"]) == index
    )


def _extrapolated(first: Value, second: Value, third: Value, iterations: int) -> Value:
    """What follows on `first` after so many equal steps; None if steps differ or it overflows."""
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
