"""Compares experts with a loop, and tests shared experts and residual mixtures."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import MixtureOfExperts, TopKRouter
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.testing.layers import assert_close
from tests.layers.moe.dispatch_names import dispatch_params

E, G, C, M, H = 3, 2, 4, 5, 6
FUNCTIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "linear": lambda x: x,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}
GATES = {"swiglu": "silu", "reglu": "relu", "bilinear": "linear", "glu": "sigmoid"}
RNG = np.random.default_rng(1)
X_EGCM = RNG.normal(size=(E, G, C, M)).astype(np.float32)
X_BLM = RNG.normal(size=(2, 6, M)).astype(np.float32)


def away_from_zero(layer, seed: int = 2):
    """Returns weights and biases without zeros."""
    rng = np.random.default_rng(seed)
    return layer.init(1).transform(lambda w: w + rng.normal(size=w.shape).astype(np.float32) / 3)


def network(theta, e: int, x: np.ndarray, activation: str) -> np.ndarray:
    """Computes one expert in float64."""
    weights = {name: w[e].numpy().astype(np.float64) for name, w in theta.flatten_items()}

    def inwards(name):
        return x @ weights[f"w_{name}"] + weights.get(f"b_{name}", 0)

    h = FUNCTIONS[GATES.get(activation, activation)](inwards("in"))
    if activation in GATES:
        h = h * inwards("factor")
    return h @ weights["w_out"] + weights.get("b_out", 0)


def mixture(**values) -> MixtureOfExperts:
    params = MixtureOfExperts.params().set(model_dim=M, hidden_dim=H, num_experts=E, **values)
    params.router = TopKRouter.params().set(k=2, evaluation_capacity_factor=float(E))
    params.experts.set(activation="swiglu", use_bias=True)
    return params.instantiate(path="moe")


def _dropless() -> MixtureOfExperts:
    layer = mixture().p.copy().set(dispatch=dispatch_params("dropless"))
    layer.router.evaluation_capacity_factor = 0.0
    return layer.instantiate(path="moe")


class ExpertsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(use_bias=[False, True], activation=["relu", "silu", *GATES])
    def test_every_expert_uses_its_own_weights(self, activation, use_bias):
        params = Experts.params().set(
            model_dim=M, hidden_dim=H, num_experts=E, activation=activation
        )
        layer = params.set(use_bias=use_bias).instantiate(path="experts")
        theta = away_from_zero(layer)
        y = layer.fprop(theta, tf.constant(X_EGCM))
        for e in range(E):
            expected = network(theta, e, X_EGCM[e].astype(np.float64), activation)
            assert_close(y[e], expected, "float32")
            rows = tf.reshape(X_EGCM[e], (G * C, M))
            one_expert = layer.compute_one(theta.transform(lambda w, e=e: w[e]), rows)
            assert_close(tf.reshape(one_expert, (G, C, M)), y[e], "order")

    def test_dropout_of_hidden_activations_is_applied_in_training_only(self):
        params = Experts.params().set(model_dim=M, hidden_dim=H, num_experts=E, dropout_rate=0.5)
        layer = params.instantiate(path="experts")
        theta = away_from_zero(layer)
        exact = layer.fprop(theta, tf.constant(X_EGCM))
        for training in (False, True):
            with context.scope(training=training, seed=tf.constant([1, 0])):
                y = layer.fprop(theta, tf.constant(X_EGCM))
            self.assertEqual(np.array_equal(y, exact), not training)

    def test_a_shared_expert_processes_every_token(self):
        layer = mixture(shared_hidden_dim=7)
        theta = away_from_zero(layer)
        mask = np.ones(X_BLM.shape[:2])
        routed = mixture()
        y_routed = routed.fprop(theta, tf.constant(X_BLM), mask)
        shared = layer.shared.fprop(theta.shared, tf.constant(X_BLM), mask)
        self.assertEqual(theta.shared.w_in.shape, (M, 7))
        self.assertIn("w_factor", theta.shared)
        assert_close(layer.fprop(theta, tf.constant(X_BLM), mask), y_routed + shared, "order")

    def test_a_residual_mixture_weights_both_outputs_by_a_softmax(self):
        layer = mixture(shared_hidden_dim=7, shared_combination="learned")
        theta = away_from_zero(layer)
        mask = np.ones(X_BLM.shape[:2])
        y_routed = mixture().fprop(theta, tf.constant(X_BLM), mask).numpy()
        y_shared = layer.shared.fprop(theta.shared, tf.constant(X_BLM), mask).numpy()
        logit = X_BLM.astype(np.float64) @ theta.w_mix.numpy()
        two = np.exp(np.stack([logit, np.zeros_like(logit)], -1))
        share = (two / two.sum(-1, keepdims=True))[..., :1]
        expected = y_routed * share + y_shared * (1 - share)
        assert_close(layer.fprop(theta, tf.constant(X_BLM), mask), expected, "float32")

    def test_rejects_an_unknown_combination(self):
        with self.assertRaisesRegex(
            ValueError, "shared_combination is 'smu'; expected 'sum', 'learned' or 'gated'"
        ):
            mixture(shared_hidden_dim=7, shared_combination="smu")

    @parameterized.parameters("gather", "einsum", "dropless")
    def test_an_expert_may_have_no_tokens(self, dispatch):
        """Expert 0 has the smallest logit for all tokens."""
        layer = (
            mixture(dispatch=dispatch_params(dispatch)) if dispatch != "dropless" else _dropless()
        )
        theta = away_from_zero(layer)
        w_gate = np.zeros((M, E), np.float32)
        w_gate[:, 0] = -5
        theta.router.w_gate = tf.constant(w_gate)
        x = tf.constant(np.abs(X_BLM))
        with tf.GradientTape() as tape:
            tape.watch(theta.flatten())
            with context.scope() as scope:
                y = layer.fprop(theta, x, np.ones(X_BLM.shape[:2]))
                total = tf.reduce_sum(y * y)
        self.assertEqual(float(scope.metrics["moe/dead_experts"][0]), 1)
        gradients = theta.pack(tape.gradient(total, theta.flatten()))
        for name, gradient in gradients.experts.flatten_items():
            self.assertFalse(np.any(gradient[0]), name)
            self.assertTrue(np.any(gradient[1]), name)
            self.assertTrue(np.all(np.isfinite(gradient)), name)


if __name__ == "__main__":
    testing.main()
