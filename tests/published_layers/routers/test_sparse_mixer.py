"""Compares SparseMixer and the biased softmax with loops over tokens."""

import math

import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import BiasedSoftmaxRouter, SparseMixerRouter
from tests.layers.moe.algorithm import softmax
from tests.layers.moe.routers import loops

LOGITS = np.random.default_rng(3).normal(size=(2, 9, 6)).astype(np.float32)


def near_gate(logits: np.ndarray, left: list[int], threshold: float) -> tuple[int, float]:
    """Returns the best expert among those left, and its share among the near ones of them."""
    best = max(left, key=lambda e: logits[e])
    near = []
    for e in left:
        if (logits[best] - logits[e]) / max(abs(logits[e]), logits[best]) <= threshold:
            near.append(e)
    total = sum(math.exp(logits[e] - logits[best]) for e in near)
    return best, 1.0 / total


class SparseMixerTest(testing.TestCase):
    def test_equals_a_loop_over_tokens(self):
        layer, theta = loops.make(SparseMixerRouter, 6, threshold=0.8, capacity_factor=6.0)
        routing = loops.route(layer, theta, LOGITS)
        shares = []
        for g in range(2):
            for s in range(9):
                logits = LOGITS[g, s].astype(np.float64)
                left = list(range(6))
                for choice in routing.assignments:
                    expert, gate = near_gate(logits, left, 0.8)
                    left.remove(expert)
                    self.assertEqual(choice.expert_GS[g, s], expert)
                    assert_close(choice.gate_GS[g, s], gate, "float32")
                    shares.append(gate)
        self.assertLess(min(shares), 0.7)
        self.assertEqual(max(shares), 1.0)

    def test_each_choice_counts_for_half_a_token_in_the_loss(self):
        layer, theta = loops.make(SparseMixerRouter, 6)
        gates_GSE = softmax(LOGITS)
        real_GS = np.random.default_rng(4).random(LOGITS.shape[:2]) < 0.7
        losses = [
            loops.load_balancing_loss([[(e, 0) for e in loops.top(x, 2)] for x in gates], gates, r)
            for gates, r in zip(gates_GSE, real_GS, strict=True)
        ]
        found = loops.route(layer, theta, LOGITS, real_GS).losses["auxiliary_loss"].value
        assert_close(found, loops.mean_of_groups(losses, real_GS), "float32")

    def test_without_a_threshold_every_gate_is_1(self):
        made = loops.make(SparseMixerRouter, 6, threshold=0.0, capacity_factor=6.0)

        # Outside of programs, some CPUs divide equal numbers to the number before 1.
        @tf.function(jit_compile=True)
        def gates():
            return [choice.gate_GS for choice in loops.route(*made, LOGITS).assignments]

        for gate_GS in gates():
            self.assertAllEqual(gate_GS, np.ones((2, 9)))


class BiasedSoftmaxTest(testing.TestCase):
    def test_the_bias_selects_and_gates_are_of_the_softmax(self):
        layer, theta = loops.make(BiasedSoftmaxRouter, 6, k=2, capacity_factor=6.0)
        bias = np.array([0.0, 0.4, -0.3, 0.2, 0.0, 0.1])
        theta = NestedMap(theta, selection_bias=tf.constant(bias, tf.float32))
        routing = loops.route(layer, theta, LOGITS)
        for g in range(2):
            for s in range(9):
                gates = softmax(LOGITS[g])[s]
                experts = loops.top(gates + bias, 2)
                for choice, expert in zip(routing.assignments, experts, strict=True):
                    self.assertEqual(choice.expert_GS[g, s], expert)
                    expected = gates[expert] / sum(gates[e] for e in experts)
                    assert_close(choice.gate_GS[g, s], expected, "float32")


if __name__ == "__main__":
    testing.main()
