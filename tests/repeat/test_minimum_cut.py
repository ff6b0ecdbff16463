"""Compares the minimum cut with an exhaustive search over all sets of saved tensors."""

import itertools
import math

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lingvo_gshard import testing
from lingvo_gshard.wings.repeat.minimum_cut import tensors_to_save


class Case:
    """A random graph of sums; `later` holds the operations of the backward pass."""

    def __init__(
        self, reads: list[list[int]], later: int, save_costs: list[int], recompute_costs: list
    ):
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
        self._save_costs, self._recompute_costs = save_costs, [None, *recompute_costs]

    def save_cost(self, tensor: tf.Tensor) -> float:
        return self._save_costs[self.number[tensor.op]]

    def recompute_cost(self, operation: tf.Operation) -> float | None:
        return self._recompute_costs[self.number[operation]]

    def cost(self, saved: set[tf.Operation]) -> float:
        """Returns the cost of saving these operations and recomputing the others."""
        total = sum(self._save_costs[self.number[operation]] for operation in saved)
        ahead, seen = [x.op for op in self.later for x in op.inputs], set()
        while ahead:
            operation = ahead.pop()
            if operation in self.later or operation in saved or operation in seen:
                continue
            seen.add(operation)
            cost = self.recompute_cost(operation)
            total += math.inf if cost is None else cost
            ahead.extend(x.op for x in operation.inputs)
        return total


COSTS = st.integers(1, 9)
NUMBERS = st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=3), min_size=2, max_size=7)


class MinimumCutTest(testing.TestCase):
    @settings(max_examples=150, deadline=None)
    @given(
        NUMBERS,
        st.integers(0, 20),
        st.lists(COSTS, min_size=8, max_size=8),
        st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=7, max_size=7),
    )
    def test_the_cut_has_the_minimum_cost(self, reads, later, save_costs, recompute_costs):
        case = Case(reads, later, save_costs, recompute_costs)
        source = case.operations[0]
        tensors = tensors_to_save(
            case.operations, [source], case.later, case.save_cost, case.recompute_cost
        )
        saved = {tensor.op for tensor in tensors}
        self.assertEqual(len(saved), len(tensors))
        self.assertFalse(saved & case.later)
        before = [operation for operation in case.operations if operation not in case.later]
        subsets = itertools.chain.from_iterable(
            itertools.combinations(before, n) for n in range(len(before) + 1)
        )
        best = min(case.cost(set(subset)) for subset in subsets)
        # Costs are rounded to fractions of the largest one.
        self.assertAllClose(case.cost(saved), best, rtol=0, atol=0.01)

    def test_very_expensive_tensors_are_distinguished(self):
        case = Case([[0], [1], [2]], 2, [10**12, 3 * 10**12, 10**13, 1], [0, 0, 0])
        tensors = tensors_to_save(
            case.operations, case.operations[:1], case.later, case.save_cost, case.recompute_cost
        )
        self.assertEqual([tensor.op for tensor in tensors], case.operations[:1])


if __name__ == "__main__":
    testing.main()
