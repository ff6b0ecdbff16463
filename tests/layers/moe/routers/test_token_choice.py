# tests: layers/moe/routers/capacity.py, layers/moe/routers/router.py
# tests: layers/moe/routers/selection.py
"""Tests features of all token-choice routers: capacity and expert output masking."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import TopKRouter
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import ForcedBalanceRouter, HashRouter
from tests.layers.moe.routers import loops

LOGITS = np.random.default_rng(1).normal(size=(2, 16, 4)).astype(np.float32)


class TokenChoiceTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({}, 8, 8),
        ({"capacity_factor": 0.5}, 4, 4),
        ({"evaluation_capacity_factor": 1.5}, 8, 12),
        ({"capacity_factor": 1.25, "evaluation_capacity_factor": 0.25}, 10, 2),
        ({"capacity_factor": 0.25, "minimum_capacity": 3}, 3, 3),
        ({"minimum_capacity": 100}, 16, 16),
        ({"capacity_factor": 4.0}, 16, 16),
    )
    def test_capacity_is_a_multiple_of_a_balanced_load(self, values, training, evaluation):
        layer, theta = loops.make(TopKRouter, 4, k=2, **values)
        self.assertEqual(loops.route(layer, theta, LOGITS, training=True).capacity, training)
        self.assertEqual(loops.route(layer, theta, LOGITS).capacity, evaluation)

    def test_skewed_loads_drop_tokens_and_balanced_ones_do_not(self):
        def dropped(**values) -> float:
            layer, theta = loops.make(ForcedBalanceRouter, 4, k=2, **values)
            return 1 - float(tf.reduce_sum(loops.route(layer, theta, LOGITS).load())) / 64

        self.assertEqual(dropped(), 0.0)
        self.assertGreater(dropped(skew=0.5), 0.1)
        self.assertEqual(dropped(skew=0.5, minimum_capacity=16), 0.0)

    def test_unlimited_capacity_drops_no_tokens(self):
        layer, theta = loops.make(TopKRouter, 4, k=2)
        one_sided = np.tile(LOGITS[:1, :1], (1, 16, 1))
        self.assertFalse(tf.reduce_all(loops.route(layer, theta, one_sided).assignments[0].kept_GS))
        layer, theta = loops.make(TopKRouter, 4, k=2, is_dropless=True)
        routing = loops.route(layer, theta, one_sided)
        self.assertEqual(routing.capacity, 16)
        for choice in routing.assignments:
            self.assertTrue(tf.reduce_all(choice.kept_GS))

    @parameterized.parameters("capacity_factor", "evaluation_capacity_factor")
    def test_unlimited_capacity_rejects_a_capacity_factor(self, name):
        with self.assertRaisesRegex(ValueError, f"router.{name}=2 limits .* dropless"):
            loops.make(TopKRouter, 4, **{name: 2.0}, is_dropless=True)

    def masked_gates(self, rate: float, training: bool, seed: int = 1) -> np.ndarray:
        """Returns the gates [2,4000] of two choices, which would be 1/2 without masking."""
        p = HashRouter.params().set(
            num_experts=4, k=2, capacity_factor=4.0, output_masking_rate=rate
        )
        ids = tf.range(4000)[None]
        x = tf.zeros((1, 4000, 4))
        router = p.instantiate(path="router")
        routing = loops.route(router, NestedMap(), x, training=training, seed=seed, ids=ids)
        for choice in routing.assignments:
            self.assertTrue(tf.reduce_all(choice.kept_GS))
        return np.stack([choice.gate_GS[0] for choice in routing.assignments])

    def test_output_masking_zeroes_gates_and_rescales_the_rest(self):
        gates = self.masked_gates(0.2, training=True)
        assert_close((gates == 0).mean(axis=1), [0.2, 0.2], "sampling", least_scale=1)
        both = (gates == 0).all(axis=0).mean()
        assert_close(both, 0.2 * 0.2, "sampling", least_scale=1)
        assert_close(gates[gates > 0], np.full((gates > 0).sum(), 0.5 / 0.8), "float32")

    def test_output_masking_depends_on_the_seed_in_training_only(self):
        halves = np.full((2, 4000), 0.5)
        self.assertAllEqual(self.masked_gates(0.2, training=False), halves)
        self.assertAllEqual(self.masked_gates(0.0, training=True), halves)
        first, again, other = (self.masked_gates(0.2, True, seed) for seed in (1, 1, 2))
        self.assertAllEqual(first, again)
        self.assertNotAllEqual(first, other)

    def test_rejects_an_unknown_priority(self):
        message = r"priority is 'gates'; expected 'position' or 'gate'"
        with self.assertRaisesRegex(ValueError, message):
            loops.make(TopKRouter, 4, priority="gates")


if __name__ == "__main__":
    testing.main()
