"""Compares the top-k router with loops over tokens, and tests its options."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import TopKRouter
from lingvo_gshard.testing.layers import assert_close
from tests.layers.moe.algorithm import softmax
from tests.layers.moe.routers import loops


def choices_of(gates_SE: np.ndarray, k: int, normalize: bool) -> loops.Choices:
    choices = []
    for gates in gates_SE:
        chosen = loops.top(gates, k)
        total = sum(gates[e] for e in chosen) if normalize else 1.0
        choices.append([(e, gates[e] / total) for e in chosen])
    return choices


class TopKTest(testing.TestCase, parameterized.TestCase):
    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(data=st.data(), problem=loops.problems())
    def test_equals_a_loop_over_tokens(self, data, problem):
        groups, tokens, experts = problem.logits_GSE.shape
        k = data.draw(st.integers(1, experts))
        values = {
            "k": k,
            "normalize": k > 1 and data.draw(st.booleans()),
            "capacity_factor": data.draw(st.sampled_from([0.25, 0.5, 1.0, 2.0, 6.0])),
            "minimum_capacity": data.draw(st.sampled_from([1, 2, 20])),
            "priority": data.draw(st.sampled_from(["position", "gate"])),
        }
        gates_GSE = softmax(problem.logits_GSE)
        choices_G = [choices_of(gates_SE, k, values["normalize"]) for gates_SE in gates_GSE]
        first = np.sort([[choices[0][1] for choices in choices_S] for choices_S in choices_G], -1)
        is_ordered = values["priority"] == "position" or np.diff(first).min(initial=1) > 3e-6
        hypothesis.assume(is_ordered and not problem.has_near_ties())

        routing = loops.route(
            *loops.make(TopKRouter, experts, **values), problem.logits_GSE, problem.real_GS
        )
        slots = loops.slots(
            tokens, experts, k, values["capacity_factor"], values["minimum_capacity"]
        )
        self.assertEqual((routing.capacity, routing.num_experts), (slots, experts))
        losses = []
        for g in range(groups):
            by_gate = values["priority"] == "gate"
            expected = loops.place(choices_G[g], problem.real_GS[g], experts, slots, by_gate)
            loops.assert_same(routing, g, expected)
            losses.append(loops.load_balancing_loss(choices_G[g], gates_GSE[g], problem.real_GS[g]))
        assert_close(
            routing.losses["auxiliary_loss"].value,
            loops.mean_of_groups(losses, problem.real_GS),
            "float32",
        )

    def test_normalized_gates_are_a_softmax_of_the_largest_logits(self):
        logits = np.random.default_rng(1).normal(size=(1, 7, 5)).astype(np.float32)
        routing = loops.route(*loops.make(TopKRouter, 5, k=3, capacity_factor=5.0), logits)
        gates = np.stack([choice.gate_GS[0] for choice in routing.assignments], -1)
        assert_close(gates, softmax(-np.sort(-logits[0], -1)[:, :3]), "float32")

    def test_a_bias_of_the_logits_and_a_scale_of_the_gates(self):
        logits = np.random.default_rng(1).normal(size=(1, 7, 4)).astype(np.float32)
        layer, theta = loops.make(TopKRouter, 4, k=2, capacity_factor=4.0, use_bias=True, scale=2.5)
        bias = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
        routing = loops.route(layer, NestedMap(theta, b_gate=tf.constant(bias)), logits)
        order = np.argsort(-(logits[0] + bias), -1)[:, :2]
        chosen = np.stack([choice.expert_GS[0] for choice in routing.assignments], -1)
        self.assertAllEqual(chosen, order)
        gates = np.stack([choice.gate_GS[0] for choice in routing.assignments], -1)
        expected = 2.5 * softmax(np.take_along_axis(logits[0] + bias, order, -1))
        assert_close(gates, expected, "float32")

    @parameterized.parameters(1, 2, 3, 4)
    def test_balanced_loads_give_a_loss_of_1(self, k):
        rotated = np.stack([np.roll([3.0, 2, 1, 0], s) for s in range(8)])[None].astype(np.float32)
        routing = loops.route(*loops.make(TopKRouter, 4, k=k, normalize=False), rotated)
        assert_close(routing.losses["auxiliary_loss"].value, 1.0, "float32")
        for choice in routing.assignments:
            self.assertTrue(tf.reduce_all(choice.kept_GS))

    @parameterized.parameters(True, False)
    def test_normalizing_has_no_effect_if_all_experts_are_chosen(self, normalize):
        logits = np.random.default_rng(1).normal(size=(1, 7, 3)).astype(np.float32)
        layer, theta = loops.make(TopKRouter, 3, k=3, normalize=normalize)
        gates = sum(choice.gate_GS for choice in loops.route(layer, theta, logits).assignments)
        assert_close(gates, np.ones((1, 7)), "float32")

    def test_gates_have_a_gradient_to_the_weight(self):
        x = np.random.default_rng(1).normal(size=(1, 7, 4)).astype(np.float32)
        layer, theta = loops.make(TopKRouter, 4, k=2, capacity_factor=4.0)
        with tf.GradientTape() as tape:
            tape.watch(theta.w_gate)
            gate_GS = loops.route(layer, theta, x).assignments[0].gate_GS
        gates = softmax(-np.sort(-x[0], -1)[:, :2])
        chosen = np.argsort(-x[0], -1)[:, :2]
        expected = np.zeros((4, 4))
        for s in range(7):
            slope = gates[s, 0] * gates[s, 1]
            expected[:, chosen[s, 0]] += slope * x[0, s]
            expected[:, chosen[s, 1]] -= slope * x[0, s]
        assert_close(tape.gradient(gate_GS, theta.w_gate), expected, "float32")

    @parameterized.parameters(
        ({"k": 5}, "router.k: 5 experts per token, but router.num_experts=4"),
        ({"k": 1}, "router.k=1 with router.normalize=True"),
    )
    def test_rejects_invalid_options(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            loops.make(TopKRouter, 4, **values)


if __name__ == "__main__":
    testing.main()
