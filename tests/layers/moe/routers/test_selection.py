"""Compares the selection of experts by one reduction with a sort, ties included."""

import dataclasses
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.layers.moe.routers import selection
from lingvo_gshard.sharding import Partitioning, use_partitioning
from lingvo_gshard.wings.pipeline.vectorize import vectorize

G, S, E, K = 2, 5, 12, 3


def sorted_experts(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, -1, kind="stable")[..., :k]


def best(scores_GSE: tf.Tensor, k: int = K) -> tf.Tensor:
    return tf.stack(selection.best_experts(scores_GSE, k), -1)


class BestExpertsTest(testing.TestCase):
    @hypothesis.settings(max_examples=15, deadline=None)
    @hypothesis.given(seed=st.integers(0, 2**32), experts=st.integers(1, 20), data=st.data())
    def test_equals_a_stable_sort_with_ties_and_excluded_experts(self, seed, experts, data):
        k = data.draw(st.integers(1, experts))
        rng = np.random.default_rng(seed)
        scores = rng.integers(0, 4, (G, S, experts)).astype(np.float32)
        scores[rng.random(scores.shape) < 0.2] = -np.inf
        self.assertAllEqual(best(tf.constant(scores), k), sorted_experts(scores, k))

    def test_equals_rounds_of_the_largest_score(self):
        scores = tf.cast(tf.random.stateless_normal([G, S, E], [0, 1]), tf.float64)
        rounds = [expert_GS for expert_GS, _ in selection.top_k(scores, K)]
        self.assertAllEqual(best(scores), tf.stack(rounds, -1))

    def test_scores_that_are_no_numbers_give_experts_that_exist(self):
        found = best(tf.fill([G, S, E], np.float32(np.nan))).numpy()
        self.assertTrue(np.all((found >= 0) & (found < E)))

    def test_gpus_compile_one_reduction_and_other_devices_one_for_each_expert(self):
        scores = tf.zeros([G, S, E])

        def reductions(platform: str) -> int:
            @tf.function(jit_compile=True, autograph=False)
            def select(scores):
                partitioning = Partitioning.make("data=1", "data")
                with use_partitioning(dataclasses.replace(partitioning, platform=platform)):
                    return [expert_GS for expert_GS, _ in selection.top_k(scores, K)]

            hlo = select.experimental_get_compiler_ir(scores)(stage="hlo")
            return len(re.findall(r" reduce\(", hlo))

        self.assertEqual((reductions("cuda"), reductions("tpu")), (1, K))

    def test_stages_of_a_pipeline_select_at_once(self):
        scores = tf.random.stateless_normal([4, G, S, E], [0, 1])
        stages = tf.function(lambda x: vectorize("P", lambda one: [best(one)], x), autograph=False)
        self.assertAllEqual(stages(scores)[0], sorted_experts(scores.numpy(), K))

    def test_values_at_experts_and_their_gradients_are_those_of_each_expert(self):
        values = tf.random.stateless_normal([G, S, E], [0, 2])
        selected = selection.top_k(values, K)
        weights = tf.random.stateless_normal([K, G, S], [0, 3])
        results = []
        for read in (
            lambda x: selection.values_at(x, selected),
            lambda x: [selection.value_at(x, one_hot) for _, one_hot in selected],
        ):
            with tf.GradientTape() as tape:
                tape.watch(values)
                found = tf.stack(read(values))
                total = tf.reduce_sum(found * weights)
            results.append((found, tape.gradient(total, values)))
        self.assertAllEqual(results[0][0], results[1][0])
        self.assertAllEqual(results[0][1], results[1][1])


if __name__ == "__main__":
    testing.main()
