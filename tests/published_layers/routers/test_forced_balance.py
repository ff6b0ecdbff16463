"""Compares the forced-balance router with a loop over tokens."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import ForcedBalanceRouter
from tests.layers.moe.algorithm import softmax
from tests.layers.moe.routers import loops

# Experts per token, and experts.
SIZES = ((1, 1), (1, 4), (2, 4), (2, 5), (4, 4))


def experts_by_loop(tokens: int, k: int, experts: int, skew: float) -> list[list[int]]:
    """Deals experts in turn. A token is skewed whenever the share of skewed tokens is too small."""
    dealt, num_others, skewed, found = 0, 0, 0, []
    for s in range(tokens):
        if skewed + 1 <= (s + 1) * skew:
            skewed += 1
            others = []
            for _ in range(k - 1):
                others.append(1 + num_others % (experts - 1))
                num_others += 1
            found.append([0, *others])
        else:
            found.append([(dealt + i) % experts for i in range(k)])
            dealt += k
    return found


class ForcedBalanceTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(
        [dict(zip(("k", "experts"), sizes, strict=True)) for sizes in SIZES],
        skew=[0.0, 0.25, 0.5, 0.75, 1.0],
    )
    def test_equals_a_loop_over_tokens(self, k, experts, skew):
        rng = np.random.default_rng(1)
        logits = rng.normal(size=(2, 16, experts)).astype(np.float32)
        real = rng.random((2, 16)) < 0.8
        values = {"k": k, "skew": skew, "capacity_factor": 1.5}
        routing = loops.route(*loops.make(ForcedBalanceRouter, experts, **values), logits, real)
        for g in range(2):
            gates, dealt = softmax(logits[g]), experts_by_loop(16, k, experts, skew)
            choices = [[(e, gates[s, e]) for e in dealt[real[g, :s].sum()]] for s in range(16)]
            slots = loops.slots(16, experts, k, 1.5)
            loops.assert_same(routing, g, loops.place(choices, real[g], experts, slots))

    def test_loads_are_balanced_for_any_weights_and_no_token_is_dropped(self):
        logits = np.tile(np.array([9.0, 0, 0, 0], np.float32), (3, 8, 1))
        routing = loops.route(*loops.make(ForcedBalanceRouter, 4), logits)
        self.assertAllEqual(routing.load(), [12.0] * 4)
        self.assertEqual(routing.losses, {})

    @parameterized.parameters(0.1, 0.3, 0.5)
    def test_a_skewed_share_goes_to_expert_0_first(self, skew):
        layer, theta = loops.make(ForcedBalanceRouter, 8, k=2, skew=skew, capacity_factor=8.0)
        routing = loops.route(layer, theta, np.zeros((1, 4000, 8), np.float32))
        load = routing.load().numpy() / 4000
        assert_close(load[0], skew + (1 - skew) * 2 / 8, "sampling")
        assert_close(load[1:], np.full(7, (skew + (1 - skew) * 2 * 7 / 8) / 7), "sampling")
        first_half = routing.assignments[0].expert_GS[0, :2000].numpy()
        assert_close((first_half == 0).mean(), skew + (1 - skew) / 4, "sampling", least_scale=1)

    def test_the_experts_of_a_token_are_distinct(self):
        layer, theta = loops.make(ForcedBalanceRouter, 5, k=4, skew=0.4)
        choices = loops.route(layer, theta, np.zeros((1, 50, 5), np.float32)).assignments
        experts = np.sort([choice.expert_GS[0] for choice in choices], axis=0)
        self.assertTrue((np.diff(experts, axis=0) > 0).all())

    def test_the_weight_has_a_gradient(self):
        x = np.random.default_rng(1).normal(size=(1, 8, 4)).astype(np.float32)
        layer, theta = loops.make(ForcedBalanceRouter, 4, k=1)
        with tf.GradientTape() as tape:
            tape.watch(theta.w_gate)
            gate_GS = loops.route(layer, theta, x).assignments[0].gate_GS
        gates, chosen = softmax(x[0]), np.arange(8) % 4
        at = gates[np.arange(8), chosen]
        expected = x[0].T @ (at[:, None] * (np.eye(4)[chosen] - gates))
        assert_close(tape.gradient(gate_GS, theta.w_gate), expected, "float32")

    def test_rejects_more_experts_per_token_than_experts(self):
        message = "router.k: 5 experts per token, but router.num_experts=4"
        with self.assertRaisesRegex(ValueError, message):
            loops.make(ForcedBalanceRouter, 4, k=5)


if __name__ == "__main__":
    testing.main()
