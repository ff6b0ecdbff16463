"""Compares the Sinkhorn router with Sinkhorn's iteration on matrices, and tests its properties."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from scipy import optimize

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import SinkhornRouter
from tests.layers.moe.algorithm import softmax
from tests.layers.moe.routers import loops


def one_sided(groups: int = 1, tokens: int = 60, experts: int = 4) -> np.ndarray:
    """Returns logits of tokens that all prefer the last experts."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(groups, tokens, experts)) + 1.5 * np.arange(experts)
    return logits.astype(np.float32)


def balanced(scores_SE: np.ndarray, iterations: int) -> np.ndarray:
    """Returns a matrix [S,E] whose rows sum to 1 and columns to S/E, by alternate scaling."""
    plan = np.exp(scores_SE.astype(np.float64))
    tokens, experts = plan.shape
    for _ in range(iterations):
        for s in range(tokens):
            plan[s] /= plan[s].sum()
        for e in range(experts):
            plan[:, e] *= tokens / experts / plan[:, e].sum()
    return plan


def load(logits: np.ndarray, training: bool, **values) -> np.ndarray:
    layer, theta = loops.make(SinkhornRouter, 4, capacity_factor=4.0, **values)
    return loops.route(layer, theta, logits, training=training).load().numpy()


class SinkhornTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(
        (
            {"gate": "softmax", "temperature": 1.0},
            {"gate": "sigmoid", "temperature": 0.5},
        ),
        iterations=[1, 2, 10],
    )
    def test_training_matches_sinkhorn_scaling(self, gate, temperature, iterations):
        logits = one_sided(groups=2, tokens=12)
        real = np.random.default_rng(2).random((2, 12)) < 0.7
        values = {"gate": gate, "temperature": temperature, "iterations": iterations}
        layer, theta = loops.make(SinkhornRouter, 4, **values, capacity_factor=1.5)
        routing = loops.route(layer, theta, logits, real, training=True)
        gates = softmax(logits) if gate == "softmax" else 1 / (1 + np.exp(-logits))
        for g in range(2):
            plan = np.zeros((12, 4))
            plan[real[g]] = balanced(logits[g][real[g]] / temperature, iterations)
            choices = [[(e, gates[g, s, e])] for s in range(12) for e in loops.top(plan[s], 1)]
            expected = loops.place(choices, real[g], 4, loops.slots(12, 4, 1, 1.5))
            loops.assert_same(routing, g, expected)

    def test_evaluation_chooses_the_largest_logit(self):
        logits = one_sided(tokens=12)
        layer, theta = loops.make(SinkhornRouter, 4, evaluation_capacity_factor=4.0)
        routing = loops.route(layer, theta, logits)
        gates = softmax(logits[0])
        choices = [[(e, gates[s, e])] for s in range(12) for e in loops.top(gates[s], 1)]
        loops.assert_same(routing, 0, loops.place(choices, np.ones(12, bool), 4, 12))
        self.assertEqual(routing.losses, {})

    def test_prices_balance_the_loads(self):
        logits = one_sided(tokens=400) * np.array([0.1, 0.5, 0.5, 1.5], np.float32)
        self.assertGreater(load(logits, training=False).max(), 250)
        warm = load(logits, training=True).max()
        self.assertGreater(load(logits, training=True, iterations=1).max(), warm)
        cold = load(logits, training=True, iterations=100, temperature=0.1).max()
        self.assertLess(cold, 110)
        self.assertGreater(warm, 120)
        self.assertLess(warm, 180)

    def test_a_low_temperature_gives_the_optimal_assignment(self):
        """Compares with BASE layers: the balanced assignment of the largest total score."""
        logits = one_sided(tokens=16)
        layer, theta = loops.make(SinkhornRouter, 4, iterations=2000, temperature=0.02)
        routing = loops.route(layer, theta, logits, training=True)
        experts = routing.assignments[0].expert_GS[0].numpy()
        tokens, seats = optimize.linear_sum_assignment(-np.repeat(logits[0], 4, axis=1))
        self.assertAllEqual(experts[tokens], seats // 4)

    def test_padding_does_not_affect_prices(self):
        logits = one_sided(tokens=10)
        layer, theta = loops.make(SinkhornRouter, 4, capacity_factor=4.0)
        unpadded = loops.route(layer, theta, logits, training=True).assignments[0]
        padded = np.concatenate([np.full((1, 6, 4), 7.0, np.float32), logits], axis=1)
        real = np.arange(16)[None] >= 6
        padded_choices = loops.route(layer, theta, padded, real, training=True).assignments[0]
        self.assertAllEqual(padded_choices.expert_GS[:, 6:], unpadded.expert_GS)
        self.assertFalse(tf.reduce_any(padded_choices.kept_GS[:, :6]))
        nothing = loops.route(layer, theta, padded, np.zeros((1, 16)), training=True)
        self.assertFalse(tf.reduce_any(nothing.assignments[0].kept_GS))

    @parameterized.parameters(1, 5)
    def test_tokens_that_are_alike_go_to_the_expert_with_the_largest_logit(self, tokens):
        """Their balanced plan is even over the experts, so that rounding would choose."""
        rng = np.random.default_rng(4)
        logits = rng.normal(size=(200, 1, 4)).astype(np.float32)
        layer, theta = loops.make(SinkhornRouter, 4, capacity_factor=4.0)
        real = np.arange(6) < tokens
        padded = np.where(real[:, None], logits, rng.normal(size=(200, 6, 4))).astype(np.float32)
        found = loops.route(layer, theta, padded, np.tile(real, (200, 1)), training=True)
        chosen = found.assignments[0].expert_GS.numpy()[:, :tokens]
        self.assertAllEqual(chosen, np.tile(logits.argmax(-1), (1, tokens)))

    def test_the_gradient_flows_only_through_the_gates(self):
        logits = tf.constant(one_sided(tokens=8))
        layer, theta = loops.make(SinkhornRouter, 4, capacity_factor=4.0)
        with tf.GradientTape() as tape:
            tape.watch(logits)
            choice = loops.route(layer, theta, logits, training=True).assignments[0]
        gates, chosen = softmax(logits.numpy())[0], choice.expert_GS[0].numpy()
        at = gates[np.arange(8), chosen]
        expected = at[:, None] * (np.eye(4)[chosen] - gates)
        assert_close(tape.gradient(choice.gate_GS, logits)[0], expected, "float32")

    def test_the_z_loss_is_the_only_loss(self):
        layer, theta = loops.make(SinkhornRouter, 4, z_loss_weight=0.1)
        routing = loops.route(layer, theta, one_sided(), training=True)
        self.assertEqual(list(routing.losses), ["z_loss"])
        entropy = float(routing.metrics["router_entropy"])
        self.assertGreater(entropy, 0)
        self.assertLess(entropy, np.log(4))

    def test_rejects_an_unknown_gate(self):
        message = "gate is 'sigmoyd'; expected 'softmax' or 'sigmoid'"
        with self.assertRaisesRegex(ValueError, message):
            loops.make(SinkhornRouter, 4, gate="sigmoyd")

    def test_causal_decoders_require_the_opt_in(self):
        p = MixtureOfExperts.params().set(model_dim=4, hidden_dim=4, num_experts=4, is_causal=True)
        p.router = SinkhornRouter.params()
        with self.assertRaisesRegex(ValueError, "moe.router: SinkhornRouter .* is_causal"):
            p.instantiate(path="moe")
        p.router.allow_causal = True
        self.assertIsInstance(p.instantiate(path="moe").router, SinkhornRouter)

    def test_compiled_results_equal_eager_ones(self):
        layer, theta = loops.make(SinkhornRouter, 4)
        logits = tf.constant(one_sided())

        @tf.function(jit_compile=True)
        def compiled(w_gate):
            theta = NestedMap(w_gate=w_gate)
            return loops.route(layer, theta, logits, training=True).assignments[0].position_GS

        expected = loops.route(layer, theta, logits, training=True).assignments[0].position_GS
        self.assertAllEqual(compiled(theta.w_gate), expected)


if __name__ == "__main__":
    testing.main()
