# tests: layers/moe/routing.py, layers/moe/dispatches/gather.py
"""Tests the order of rows by expert, and the passes over rows that moving them takes."""

import re

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe.dispatches.gather import Permutation
from lingvo_gshard.layers.moe.routing import sort_rows

E, M = 5, 7


def compiled(function, *arguments: tf.Tensor, stage: str = "hlo") -> str:
    """Returns the HLO of a function for CPUs."""
    traced = tf.function(function, jit_compile=True, autograph=False)
    return traced.experimental_get_compiler_ir(*arguments)(stage=stage)


class SortRowsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 60, 2000)
    def test_equals_a_stable_sort_with_rows_without_expert_last(self, rows):
        expert = np.random.default_rng(rows).integers(0, E + 3, rows).astype(np.int32)
        order, position = sort_rows(tf.constant(expert), E)
        expected = np.argsort(np.minimum(expert, E), kind="stable")
        if rows > 60:
            self.assertAllEqual(order, expected)
        # Without an expert any order is right.
        used = int(np.sum(expert < E))
        self.assertAllEqual(order[:used], expected[:used])
        self.assertAllEqual(tf.gather(position, order), np.arange(rows))

    def test_many_rows_are_one_sort_of_one_array(self):
        expert = tf.zeros([2000], tf.int32)
        hlo = compiled(lambda x: sort_rows(x, E), expert)
        self.assertEqual(re.findall(r"= (\S+?)\[2000\]\S* sort\(", hlo), ["s32"])
        # More keys than int32 can tell apart.
        hlo = compiled(lambda x: sort_rows(x, 2**21), expert)
        self.assertEqual(re.findall(r"= (\S+?)\[2000\]\S* sort\(", hlo), ["s64"])


class MovedRowsTest(testing.TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.choices, self.tokens, self.slots = 3, 8, 20
        slots = rng.permutation(self.slots)[: self.choices * self.tokens]
        slots = np.resize(slots, self.choices * self.tokens).reshape(self.choices, self.tokens)
        slots[2] = self.slots
        self.slot_kS = slots.astype(np.int32)
        self.rows = rng.normal(size=(self.slots, M)).astype(np.float32)
        self.gates = rng.normal(size=(self.choices, self.tokens)).astype(np.float32)
        self.d_y = rng.normal(size=(self.tokens, M)).astype(np.float32)

    def gradients(self, rows, gates, d_y):
        permutation = Permutation(tf.constant(self.slot_kS), self.slots)
        with tf.GradientTape() as tape:
            tape.watch([rows, gates])
            y = permutation.unpermute(rows, gates)
        return y, *tape.gradient(y, [rows, gates], output_gradients=d_y)

    def test_outputs_and_gradients_equal_a_loop_over_tokens(self):
        y, d_rows = np.zeros_like(self.d_y), np.zeros_like(self.rows)
        d_gates = np.zeros_like(self.gates)
        for k, s in np.ndindex(self.slot_kS.shape):
            slot = self.slot_kS[k, s]
            if slot < self.slots:
                y[s] += self.gates[k, s] * self.rows[slot]
                d_rows[slot] = self.gates[k, s] * self.d_y[s]
                d_gates[k, s] = self.d_y[s] @ self.rows[slot]
        given = map(tf.constant, (self.rows, self.gates, self.d_y))
        for found, expected in zip(self.gradients(*given), (y, d_rows, d_gates), strict=True):
            self.assertAllClose(found, expected, rtol=1e-6, atol=1e-6)

    def test_a_backward_pass_gathers_rows_once(self):
        given = list(map(tf.constant, (self.rows, self.gates, self.d_y)))
        hlo = compiled(lambda *x: self.gradients(*x)[1:], *given, stage="optimized_hlo")
        gathered = re.findall(rf"= f32\[(\d+),(?:1,)?{M}\]\S* gather\(", hlo)
        self.assertEqual(gathered, [str(self.slots)])


if __name__ == "__main__":
    testing.main()
