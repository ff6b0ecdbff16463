"""Tests capacity and the statistics of a routing."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe.load_metrics import load_metrics
from lingvo_gshard.layers.moe.routing import Assignment, TokenChoiceRouting, expert_capacity
from lingvo_gshard.testing.layers import assert_close


class ExpertCapacityTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (1024, 8, 2.0, 1, 256),
        (1024, 2048, 2.0, 1, 1),
        (10, 4, 2.0, 1, 5),
        (11, 4, 2.0, 1, 5),
        (11, 4, 2.0, 4, 8),
        (1024, 2048, 2.0, 4, 4),
        (6, 2, 100.0, 1, 6),
        (100, 8, 1.2 * 6, 1, 90),
    )
    def test_capacity(self, tokens, experts, factor, multiple, expected):
        self.assertEqual(expert_capacity(tokens, experts, factor, multiple), expected)

    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        tokens=st.integers(1, 5000),
        experts=st.integers(2, 500),
        factor=st.floats(0.1, 600),
        multiple=st.sampled_from([1, 4]),
    )
    def test_capacity_is_a_multiple_and_at_most_the_rounded_group_size(
        self, tokens, experts, factor, multiple
    ):
        slots = expert_capacity(tokens, experts, factor, multiple)
        self.assertEqual(slots % multiple, 0)
        self.assertLessEqual(multiple, slots)
        self.assertLess(slots, tokens + multiple)
        if factor >= experts:
            self.assertGreaterEqual(slots, tokens)


class LoadMetricsTest(testing.TestCase):
    def test_statistics_are_counts(self):
        rng = np.random.default_rng(1)
        experts = 3
        mask = rng.random((2, 8)) < 0.8
        picked = [rng.integers(0, experts, mask.shape) for _ in range(2)]
        wanted = [mask, mask & (rng.random(mask.shape) < 0.7)]
        kept = [w & (rng.random(mask.shape) < 0.7) for w in wanted]
        choices = tuple(
            Assignment(
                tf.constant(e, tf.int32),
                tf.zeros_like(e, tf.int32),
                tf.zeros(e.shape),
                tf.constant(k),
                tf.cast(w, tf.float32),
            )
            for e, k, w in zip(picked, kept, wanted, strict=True)
        )
        found = load_metrics(TokenChoiceRouting(choices, experts, 8), tf.cast(mask, tf.float32))
        load = np.zeros(experts)
        for experts_GS, kept_GS in zip(picked, kept, strict=True):
            for expert, is_kept in zip(experts_GS.ravel(), kept_GS.ravel(), strict=True):
                load[expert] += is_kept
        assert_close(found["load_max_over_mean"][0], load.max() / load.mean(), "float32")
        assert_close(found["dropped_share"][0], 1 - load.sum() / np.sum(wanted), "float32")
        assert_close(found["utilization"][0], load.sum() / (2 * experts * 8), "float32")
        self.assertEqual(float(found["dead_experts"][0]), (load == 0).sum())

    def test_statistics_of_only_padding_are_finite(self):
        zeros = tf.zeros([1, 4], tf.int32)
        assignment = Assignment(
            zeros, zeros, tf.zeros([1, 4]), tf.zeros([1, 4], tf.bool), tf.zeros([1, 4])
        )
        found = load_metrics(TokenChoiceRouting((assignment, assignment), 2, 4), tf.zeros([1, 4]))
        for name, (value, _) in found.items():
            self.assertTrue(np.isfinite(value), name)
        self.assertEqual(
            {name for name, (_, weight) in found.items() if float(weight)}, {"utilization"}
        )


if __name__ == "__main__":
    testing.main()
