"""The minimum cut against an exhaustive search of all choices."""

import itertools
import math

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gshard.core.autodiff.minimum_cut import tensors_to_save


class Case:
    """Sums of earlier tensors: an input, then operations, then those that come later."""

    def __init__(self, reads: list[list[int]], later: int, keeping: list[int], again: list):
        with tf.Graph().as_default():
            tensors = [tf.compat.v1.placeholder(tf.float32, [])]
            for numbers in reads:
                read = [tensors[n % len(tensors)] for n in numbers]
                tensors.append(tf.raw_ops.AddN(inputs=read))
        self.operations = [tensor.op for tensor in tensors]
        depending = {self.operations[later % len(reads) + 1]}
        for operation in self.operations:
            if any(x.op in depending for x in operation.inputs):
                depending.add(operation)
        self.later = depending
        self.number = {operation: i for i, operation in enumerate(self.operations)}
        self._keeping, self._again = keeping, [None, *again]

    def keeping(self, tensor: tf.Tensor) -> float:
        return self._keeping[self.number[tensor.op]]

    def again(self, operation: tf.Operation) -> float | None:
        return self._again[self.number[operation]]

    def cost(self, kept: set[tf.Operation]) -> float:
        """Of keeping those, and of computing again whatever else is needed later."""
        total = sum(self._keeping[self.number[operation]] for operation in kept)
        ahead, seen = [x.op for op in self.later for x in op.inputs], set()
        while ahead:
            operation = ahead.pop()
            if operation in self.later or operation in kept or operation in seen:
                continue
            seen.add(operation)
            again = self.again(operation)
            total += math.inf if again is None else again
            ahead.extend(x.op for x in operation.inputs)
        return total


COSTS = st.integers(1, 9)
NUMBERS = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=3), min_size=2, max_size=7)


@settings(max_examples=150, deadline=None)
@given(
    NUMBERS,
    st.integers(0, 20),
    st.lists(COSTS, min_size=8, max_size=8),
    st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=7, max_size=7),
)
def test_nothing_is_cheaper(reads, later, keeping, again):
    case = Case(reads, later, keeping, again)
    source = case.operations[0]
    found = tensors_to_save(case.operations, [source], case.later, case.keeping, case.again)
    kept = {tensor.op for tensor in found}
    assert len(kept) == len(found) and not kept & case.later
    before = [operation for operation in case.operations if operation not in case.later]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(before, n) for n in range(len(before) + 1)
    )
    best = min(case.cost(set(subset)) for subset in subsets)
    # Costs are rounded to parts of the dearest.
    assert math.isclose(case.cost(kept), best, abs_tol=0.01)


def test_very_dear_tensors_are_told_apart():
    case = Case([[0], [1], [2]], 2, [10**12, 3 * 10**12, 10**13, 1], [0, 0, 0])
    found = tensors_to_save(
        case.operations, case.operations[:1], case.later, case.keeping, case.again
    )
    assert [tensor.op for tensor in found] == case.operations[:1]
