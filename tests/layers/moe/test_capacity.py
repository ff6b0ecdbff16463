"""Compares the assignment of capacity slots with a loop over tokens."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe.routing import ORDERS, PRIORITIES, Choice, assign

EXPERTS = 3


def make_choices(rng: np.random.Generator, groups: int, tokens: int, count: int) -> list[Choice]:
    """Returns choices with many tied gates. Some choices are counted but not dispatched."""
    shape = (groups, tokens)
    real = rng.random(shape) < 0.8
    experts = rng.permuted(np.tile(np.arange(EXPERTS), (*shape, 1)), axis=-1)
    choices = []
    for i in range(count):
        wanted = real & (rng.random(shape) < 0.8)
        arrays = (rng.integers(1, 5, shape) / 8, wanted, real if i else wanted)
        floats = [tf.constant(array, tf.float32) for array in arrays]
        choices.append(Choice(tf.constant(experts[..., i], tf.int32), *floats))
    return choices


class AssignTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(*PRIORITIES)
    @hypothesis.settings(max_examples=30, deadline=None)
    @hypothesis.given(
        seed=st.integers(0, 2**32),
        groups=st.integers(1, 3),
        tokens=st.integers(1, 10),
        count=st.integers(1, EXPERTS),
        capacity=st.integers(1, 6),
        by=st.sampled_from(ORDERS),
    )
    def test_equals_a_loop_over_tokens(self, priority, seed, groups, tokens, count, capacity, by):
        choices = make_choices(np.random.default_rng(seed), groups, tokens, count)
        assignments = assign(choices, EXPERTS, capacity, priority, by)
        for g in range(groups):
            order = list(range(tokens))
            if priority == "gate":
                wanted, gate = choices[0].wanted_GS[g].numpy(), choices[0].gate_GS[g].numpy()
                order = [s for s in order if wanted[s]] + [s for s in order if not wanted[s]]
                real = int(wanted.sum())
                order[:real] = sorted(order[:real], key=lambda s: -gate[s])
            taken = [0] * EXPERTS
            pairs = list(zip(choices, assignments, strict=True))
            steps = [(pair, s) for pair in pairs for s in order]
            if by == "token":
                steps = [(pair, s) for s in order for pair in pairs]
            for (choice, assignment), s in steps:
                expert, wanted = int(choice.expert_GS[g, s]), bool(choice.wanted_GS[g, s] > 0)
                kept = wanted and taken[expert] < capacity
                self.assertEqual(bool(assignment.kept_GS[g, s]), kept)
                self.assertEqual(
                    float(assignment.gate_GS[g, s]), float(choice.gate_GS[g, s]) if kept else 0
                )
                if choice.counted_GS[g, s] > 0:
                    self.assertEqual(int(assignment.position_GS[g, s]), taken[expert])
                    taken[expert] += 1

    def test_gate_priority_keeps_the_largest_gates(self):
        gate_GS, ones_GS = tf.constant([[0.3, 0.9, 0.5, 0.7]]), tf.ones((1, 4))
        choice = Choice(tf.zeros((1, 4), tf.int32), gate_GS, ones_GS, ones_GS)
        (by_position,), (by_gate,) = (assign([choice], 2, 2, priority) for priority in PRIORITIES)
        self.assertAllEqual(by_position.kept_GS, [[True, True, False, False]])
        self.assertAllEqual(by_gate.kept_GS, [[False, True, False, True]])
        self.assertAllEqual(by_gate.position_GS, [[3, 0, 2, 1]])

    def test_second_choices_are_ordered_by_the_first_gate(self):
        ones_GS = tf.ones((1, 3))
        first = Choice(tf.zeros((1, 3), tf.int32), tf.constant([[0.5, 0.6, 0.9]]), ones_GS, ones_GS)
        second = Choice(tf.ones((1, 3), tf.int32), tf.constant([[0.5, 0.4, 0.1]]), ones_GS, ones_GS)
        assignments = assign([first, second], 2, 3, "gate")
        self.assertAllEqual(assignments[1].position_GS, [[2, 1, 0]])


if __name__ == "__main__":
    testing.main()
