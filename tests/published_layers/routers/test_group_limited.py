"""Compares group-limited routing with a loop over tokens and groups."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.wings.published_layers.routers.group_limited import GroupLimitedRouter, limit
from tests.layers.moe.routers import loops


class GroupLimitedTest(testing.TestCase, parameterized.TestCase):
    @hypothesis.settings(max_examples=50, deadline=None)
    @hypothesis.given(data=st.data(), groups=st.integers(1, 4), size=st.integers(1, 4))
    def test_only_experts_of_the_best_groups_remain(self, data, groups, size):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        count = data.draw(st.integers(1, groups))
        by = data.draw(st.integers(1, size))
        scores = rng.normal(size=(2, 5, groups * size)).astype(np.float32)
        found = limit(tf.constant(scores), groups, count, by).numpy()
        for g, s in np.ndindex(2, 5):
            worth = []
            for d in range(groups):
                within = scores[g, s, d * size : (d + 1) * size].astype(np.float64)
                worth.append(sum(within[e] for e in loops.top(within, by)))
            best = loops.top(np.array(worth), count)
            expected = [x if e // size in best else -np.inf for e, x in enumerate(scores[g, s])]
            self.assertAllEqual(found[g, s], expected)

    def test_duplicate_scores_count_separately(self):
        scores = tf.constant([[[1.0, 1.0, 2.0, 0.0]]])
        self.assertAllEqual(limit(scores, 2, 1, 2), [[[1.0, 1.0, -np.inf, -np.inf]]])
        self.assertAllEqual(limit(scores, 2, 1, 1), [[[-np.inf, -np.inf, 2.0, 0.0]]])

    def test_groups_limit_the_choice(self):
        logits = np.array([[[9.0, 0, 8, 7, 1, 6]]], np.float32)
        values = {"k": 3, "capacity_factor": 6.0}

        def chosen(**more) -> list[int]:
            layer, theta = loops.make(GroupLimitedRouter, 6, **values, **more)
            return [
                int(choice.expert_GS[0, 0])
                for choice in loops.route(layer, theta, logits).assignments
            ]

        self.assertEqual(chosen(), [0, 2, 3])
        self.assertEqual(chosen(expert_groups=3, groups_per_token=3), [0, 2, 3])
        self.assertEqual(chosen(expert_groups=3, groups_per_token=2), [0, 2, 3])
        self.assertEqual(chosen(expert_groups=2, groups_per_token=1), [0, 2, 1])
        logits = np.log(np.array([[[8.0, 0.1, 7, 6, 7.5, 5]]], np.float32))
        self.assertEqual(chosen(expert_groups=3, groups_per_token=2), [0, 4, 5])
        self.assertEqual(chosen(expert_groups=3, groups_per_token=2, scores_per_group=2), [4, 2, 3])

    @parameterized.parameters(
        ({"expert_groups": 2, "groups_per_token": 0}, "router.groups_per_token=0 of router.exp"),
        ({"expert_groups": 4}, "router.expert_groups=4 does not divide router.num_experts=6"),
        ({"expert_groups": 3, "groups_per_token": 4}, "per_token=4 of router.expert_groups=3; 1 t"),
        ({"groups_per_token": 2}, "router.groups_per_token=2 with router.expert_groups=0"),
        ({"k": 3, "expert_groups": 3}, "router.k=3 experts of router.groups_per_token=1 groups"),
        ({"scores_per_group": 3, "expert_groups": 3}, "group=3 with router.expert_groups=3 of 2"),
    )
    def test_rejects_invalid_arguments(self, values, message):
        values = {"groups_per_token": int("expert_groups" in values), **values}
        with self.assertRaisesRegex(ValueError, message):
            loops.make(GroupLimitedRouter, 6, **values)


if __name__ == "__main__":
    testing.main()
