"""Compares the sigmoid router with loops over tokens, and tests that its bias balances loads."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.load_metrics import load_metrics
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers.sigmoid import SigmoidRouter

LOGITS = np.random.default_rng(4).normal(size=(2, 9, 6)).astype(np.float32)


def make(experts: int, bias=None, **values) -> tuple[SigmoidRouter, NestedMap]:
    """Returns a router whose logits equal its inputs."""
    params = SigmoidRouter.params().set(model_dim=experts, num_experts=experts, **values)
    bias = np.zeros(experts) if bias is None else bias
    theta = NestedMap(w_gate=tf.eye(experts), selection_bias=tf.constant(bias, tf.float32))
    return params.instantiate(path="router"), theta


def route(layer, theta, logits=LOGITS, real=None, training=False):
    logits = tf.convert_to_tensor(logits)
    mask = tf.ones(logits.shape[:2]) if real is None else tf.cast(real, tf.float32)
    with context.scope(training=training, seed=tf.constant([1, 0])) as scope:
        routing = layer.fprop(theta, logits, mask)
    return routing, scope


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def best_of(scores_E: list[float], k: int) -> list[int]:
    """Returns the k experts with the largest scores in descending order."""
    left = list(range(len(scores_E)))
    found = []
    for _ in range(k):
        best = left[0]
        for e in left:
            if scores_E[e] > scores_E[best]:
                best = e
        left.remove(best)
        found.append(best)
    return found


def experts_of(scores_E: np.ndarray, bias_E: np.ndarray, k: int, limit: tuple | None) -> list[int]:
    """Returns the experts of a token.

    Args:
      scores_E: scores of the experts.
      bias_E: selection biases.
      k: experts per token.
      limit: (groups of experts, groups per token). A group's score is the sum of its two largest.
    """
    biased = [float(score + bias) for score, bias in zip(scores_E, bias_E, strict=True)]
    if limit:
        size = len(biased) // limit[0]
        of_group = [sorted(biased[d * size : (d + 1) * size])[-2:] for d in range(limit[0])]
        allowed = best_of([sum(pair) for pair in of_group], limit[1])
        biased = [b if e // size in allowed else -np.inf for e, b in enumerate(biased)]
    return best_of(biased, k)


# Another value for each option of this router, and further options that it needs.
OPTIONS = {
    "k": {"k": 3},
    "normalize": {"normalize": False},
    "scale": {"scale": 2.0},
    "auxiliary_loss_weight": {"auxiliary_loss_weight": 0.1},
    "expert_groups": {"expert_groups": 3, "groups_per_token": 1},
    "jitter": {"jitter": 0.9},
    "z_loss_weight": {"z_loss_weight": 0.1},
    "capacity_factor": {"capacity_factor": 0.3},
    "dtype": {"dtype": "bfloat16"},
}


class SigmoidTest(testing.TestCase, parameterized.TestCase):
    def reported(self, layer, theta, logits=LOGITS, real=None) -> np.ndarray:
        """Returns the excess load reported to the update rule of the selection bias."""
        with tf.GradientTape() as tape:
            tape.watch(theta.selection_bias)
            _, scope = route(layer, theta, logits, real, training=True)
            total = tf.add_n(list(scope.losses.values()))
        self.assertEqual(float(total), 0)
        return tape.gradient(total, theta.selection_bias).numpy()

    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        tokens=st.integers(1, 9),
        experts=st.sampled_from([4, 6, 8]),
        k=st.integers(2, 4),
        limited=st.booleans(),
        normalize=st.booleans(),
        scale=st.sampled_from([1.0, 2.5]),
        factor=st.sampled_from([0.4, 1.0, 4.0]),
        bias=st.sampled_from([0.0, 0.3]),
        seed=st.integers(0, 2**32),
    )
    def test_equals_a_loop_over_tokens(
        self, tokens, experts, k, limited, normalize, scale, factor, bias, seed
    ):
        rng = np.random.default_rng(seed)
        logits = 2 * rng.normal(size=(2, tokens, experts)).astype(np.float32)
        real = rng.random((2, tokens)) < 0.8
        bias_E = (bias * rng.normal(size=experts)).astype(np.float32)
        limit = (2, 1) if limited and k <= experts // 2 else None
        options = (
            dict(zip(("expert_groups", "groups_per_token"), limit, strict=True)) if limit else {}
        )
        layer, theta = make(
            experts,
            bias_E,
            k=k,
            normalize=normalize,
            scale=scale,
            capacity_factor=factor,
            **options,
        )
        routing, _ = route(layer, theta, logits, real)
        slots = max(int(tokens * factor * k / experts), 1)
        load = np.zeros(experts)
        for g in range(2):
            count = [0] * experts
            choices = {
                s: experts_of(sigmoid(logits[g, s]), bias_E, k, limit)
                for s in range(tokens)
                if real[g, s]
            }
            for i in range(k):
                choice = routing.assignments[i]
                for s in range(tokens):
                    if s not in choices:
                        self.assertFalse(choice.kept_GS[g, s])
                        self.assertFalse(choice.gate_GS[g, s])
                        continue
                    expert = choices[s][i]
                    scores = sigmoid(logits[g, s])
                    gate = scores[expert] * scale
                    if normalize:
                        gate /= sum(scores[e] for e in choices[s])
                    kept = count[expert] < slots
                    self.assertEqual(int(choice.expert_GS[g, s]), expert)
                    self.assertEqual(bool(choice.kept_GS[g, s]), kept)
                    self.assertEqual(int(choice.position_GS[g, s]), count[expert])
                    assert_close(choice.gate_GS[g, s], gate if kept else 0, "float32")
                    count[expert] += 1
            load += count
        expected = load * experts - load.sum()
        self.assertAllEqual(self.reported(layer, theta, logits, real), expected)

    def test_the_bias_affects_choices_but_not_gates(self):
        bias = np.array([0, 0, 0, 0, 0, 5.0])
        layer, theta = make(6, bias, capacity_factor=6.0)
        first = route(layer, theta)[0].assignments[0]
        self.assertAllEqual(first.expert_GS, np.full((2, 9), 5))
        second_GS = np.argmax(LOGITS[..., :5], -1)
        score, other = sigmoid(LOGITS[..., 5]), sigmoid(np.max(LOGITS[..., :5], -1))
        assert_close(first.gate_GS, score / (score + other), "float32")
        self.assertAllEqual(route(layer, theta)[0].assignments[1].expert_GS, second_GS)

    def test_the_bias_update_opposes_the_load(self):
        layer, theta = make(6, bias_update_speed=0.25)
        rule = layer.variable_specs().selection_bias.update_rule
        moved = rule(theta.selection_bias, tf.constant([12.0, 0.0, -1.0, 300.0, -6.0, 0.0]))
        self.assertAllEqual(moved, [-0.25, 0, 0.25, -0.25, 0.25, 0])
        layer, theta = make(6, bias_update_speed=0.0)
        rule = layer.variable_specs().selection_bias.update_rule
        self.assertAllEqual(rule(theta.selection_bias, tf.ones([6])), np.zeros(6))

    @parameterized.parameters(3, 6, 7)
    def test_balanced_loads_do_not_change_the_bias(self, experts):
        """Rounding of the mean load in float32 must not look like an excess."""
        rotated = np.stack([np.roll(np.arange(experts), s) for s in range(experts)])[None]
        layer, theta = make(experts, k=2)
        excess = self.reported(layer, theta, np.tile(rotated, (1, 5, 1)).astype(np.float32))
        self.assertAllEqual(excess, np.zeros(experts))

    def test_dropped_choices_count_towards_the_load(self):
        one_sided = np.tile(np.array([3.0, 2, 1, 0], np.float32), (1, 8, 1))
        layer, theta = make(4, capacity_factor=0.25)
        self.assertAllEqual(self.reported(layer, theta, one_sided), [16, 16, -16, -16])

    def test_evaluation_does_not_report_the_load(self):
        layer, theta = make(6)
        self.assertFalse(route(layer, theta, training=False)[1].losses)

    def test_gates_are_finite_if_all_scores_underflow(self):
        layer, theta = make(4)
        for choice in route(layer, theta, np.full((1, 3, 4), -200, np.float32))[0].assignments:
            self.assertTrue(np.isfinite(choice.gate_GS).all())

    def test_the_auxiliary_loss_matches_the_paper(self):
        """Computes equations 17 to 20 of arXiv 2412.19437 per group, without the bias."""
        k, experts = 2, 6
        real = np.random.default_rng(1).random((2, 9)) < 0.7
        layer, theta = make(experts, np.arange(6.0), k=k, auxiliary_loss_weight=0.5)
        loss = route(layer, theta, real=real)[0].losses["auxiliary_loss"]
        expected = []
        for g in range(2):
            tokens = [s for s in range(9) if real[g, s]]
            total = 0.0
            for e in range(experts):
                scores = [sigmoid(LOGITS[g, s]) for s in tokens]
                chosen = sum(e in best_of(list(row), k) for row in scores)
                share = experts / (k * len(tokens)) * chosen
                total += share * sum(row[e] / row.sum() for row in scores) / len(tokens)
            expected.append(total)
        self.assertEqual(loss.weight, 0.5)
        assert_close(loss.value, np.mean(expected), "float32")
        layer, theta = make(experts)
        self.assertFalse(route(layer, theta)[0].losses)

    def test_loads_become_balanced_over_steps(self):
        """Routes tokens that all prefer the same experts for 150 steps."""
        experts, k = 8, 2
        rng = np.random.default_rng(2)
        layer, theta = make(experts, k=k, bias_update_speed=0.01, capacity_factor=4.0)
        rule = layer.variable_specs().selection_bias.update_rule
        skew = np.linspace(1.5, -1.5, experts)

        @tf.function(autograph=False)
        def step(bias, logits):
            theta.selection_bias = bias
            with tf.GradientTape() as tape:
                tape.watch(bias)
                routing, scope = route(layer, theta, logits, training=True)
                total = tf.add_n(list(scope.losses.values()))
            found = load_metrics(routing, tf.ones(logits.shape[:2]))
            return rule(bias, tape.gradient(total, bias)), found["load_max_over_mean"][0]

        uneven, bias = [], theta.selection_bias
        for _ in range(150):
            logits = rng.normal(size=(1, 256, experts)) + skew
            bias, worst = step(bias, tf.constant(logits, tf.float32))
            uneven.append(float(worst))
        self.assertGreater(np.mean(uneven[:5]), 2.0)
        self.assertLess(np.mean(uneven[-20:]), 1.25)
        self.assertTrue(np.all(np.diff(bias) > 0))

    def test_the_gate_of_a_single_expert_is_the_scale(self):
        routing, _ = route(*make(6, k=1, scale=2.5, capacity_factor=6.0))
        best = LOGITS.argmax(-1)
        expected_GSE = 2.5 * np.eye(6)[best]
        self.assertAllClose(routing.token_gates(), expected_GSE, atol=1e-6)

    @parameterized.parameters(
        ({"k": 5}, "router.k: 5 experts per token, but router.num_experts=4"),
        ({"expert_groups": 2, "groups_per_token": 1, "k": 3}, "router.k=3 .*groups_per_token=1"),
        ({"expert_groups": 3}, "router.expert_groups=3 .* router.num_experts=4"),
    )
    def test_rejects_invalid_options(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            make(4, **values)

    @parameterized.parameters(*OPTIONS)
    def test_every_option_has_an_effect(self, name):
        def outcome(**values) -> list[np.ndarray]:
            params = MixtureOfExperts.params().set(model_dim=6, hidden_dim=5, num_experts=6)
            params.router = SigmoidRouter.params().set(**values)
            layer = params.instantiate(path="moe")
            with context.scope(training=True, seed=tf.constant([1, 0])) as scope:
                y = layer.fprop(layer.init(1), tf.constant(LOGITS), np.ones((2, 9)))
            return [y.numpy(), sum(scope.losses.values()).numpy()]

        same = zip(outcome(), outcome(**OPTIONS[name]), strict=True)
        self.assertFalse(all(np.array_equal(one, other) for one, other in same))

    def test_the_bias_is_float32_even_if_weights_are_bfloat16(self):
        layer, _ = make(4, dtype="bfloat16")
        specs = layer.variable_specs()
        self.assertEqual((specs.w_gate.dtype, specs.selection_bias.dtype), ("bfloat16", "float32"))


if __name__ == "__main__":
    testing.main()
