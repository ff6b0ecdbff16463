# tests: layers/moe/routers/top_k.py
"""Compares the Switch router with loops over tokens, and its defaults with the paper."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.layers.moe import SwitchRouter
from lingvo_gshard.testing.layers import assert_close
from tests.layers.moe.algorithm import softmax
from tests.layers.moe.routers import loops


class SwitchTest(testing.TestCase):
    @hypothesis.settings(max_examples=30, deadline=None)
    @hypothesis.given(
        problem=loops.problems(fewest_experts=1),
        factor=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
        priority=st.sampled_from(["position", "gate"]),
    )
    def test_equals_a_loop_over_tokens(self, problem, factor, priority):
        hypothesis.assume(not problem.has_near_ties())
        groups, tokens, experts = problem.logits_GSE.shape
        layer, theta = loops.make(SwitchRouter, experts, capacity_factor=factor, priority=priority)
        routing = loops.route(layer, theta, problem.logits_GSE, problem.real_GS)
        slots = loops.slots(tokens, experts, 1, factor)
        self.assertEqual(routing.capacity, slots)
        losses = []
        for g in range(groups):
            gates, real_S = softmax(problem.logits_GSE[g]), problem.real_GS[g]
            choices = [[(e, gates[s, e])] for s in range(tokens) for e in loops.top(gates[s], 1)]
            expected = loops.place(choices, real_S, experts, slots, priority == "gate")
            loops.assert_same(routing, g, expected)
            losses.append(loops.load_balancing_loss(choices, gates, real_S))
        expected_loss = loops.mean_of_groups(losses, problem.real_GS)
        assert_close(routing.losses["auxiliary_loss"].value, expected_loss, "float32")

    def test_defaults_are_those_of_the_paper(self):
        p = SwitchRouter.params()
        self.assertEqual((p.jitter, p.capacity_factor, p.auxiliary_loss_weight), (0.01, 1.25, 0.01))
        layer, theta = loops.make(SwitchRouter, 4)
        logits = np.random.default_rng(1).normal(size=(1, 64, 4)).astype(np.float32)
        routing = loops.route(layer, theta, logits)
        self.assertEqual(routing.capacity, 64 * 1.25 / 4)
        jittered = loops.route(layer, theta, logits, training=True)
        both = routing.assignments[0].kept_GS & jittered.assignments[0].kept_GS
        gates = [r.assignments[0].gate_GS.numpy()[both] for r in (routing, jittered)]
        largest_difference = np.abs(gates[0] - gates[1]).max()
        self.assertGreater(largest_difference, 0)
        self.assertLess(largest_difference, 0.05)

    def test_balanced_loads_give_a_loss_of_1(self):
        routing = loops.route(*loops.make(SwitchRouter, 4), 9.0 * np.eye(4, dtype="f4")[None])
        assert_close(routing.losses["auxiliary_loss"].value, 1.0, "float32")
        logits = np.tile(9.0 * np.eye(4)[:1], (1, 4, 1))
        one_sided = loops.route(*loops.make(SwitchRouter, 4), logits)
        self.assertGreater(float(one_sided.losses["auxiliary_loss"].value), 3.9)

    def test_dropless_dispatch_rejects_a_capacity_factor(self):
        with self.assertRaisesRegex(ValueError, "router.capacity_factor=1.25 .* dropless"):
            loops.make(SwitchRouter, 4, is_dropless=True)
        layer, theta = loops.make(SwitchRouter, 4, capacity_factor=0.0, is_dropless=True)
        routing = loops.route(layer, theta, np.tile(np.eye(4, dtype="f4")[:1], (1, 9, 1)))
        self.assertTrue(tf.reduce_all(routing.assignments[0].kept_GS))


if __name__ == "__main__":
    testing.main()
