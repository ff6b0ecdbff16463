# tests: layers/moe/routing.py, layers/moe/load_metrics.py
"""Tests capacity and the statistics of a routing."""

import dataclasses
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe import SwitchRouter, Top2Router, TopKRouter, routers
from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.layers.moe.load_metrics import expert_observations, load_metrics, report
from lingvo_gshard.layers.moe.routing import (
    Assignment,
    ExpertChoiceRouting,
    TokenChoiceRouting,
    WeightedLoss,
    expert_capacity,
)
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import ExpertChoiceRouter
from tests.layers.moe import algorithm
from tests.layers.moe.routers import loops


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


GROUPS, TOKENS, EXPERTS, SLOTS = 2, 8, 3, 4


def random_token_choice(rng) -> TokenChoiceRouting:
    """Returns a routing of two choices, with gates also where a token is not kept."""
    shape = (GROUPS, TOKENS)
    experts = rng.permuted(np.tile(np.arange(EXPERTS), (*shape, 1)), axis=-1)
    assignments = []
    for choice in range(2):
        wanted = rng.random(shape) < 0.8
        assignments.append(
            Assignment(
                tf.constant(experts[..., choice], tf.int32),
                tf.constant(rng.integers(0, TOKENS, shape), tf.int32),
                tf.constant(rng.uniform(0.1, 0.9, shape), tf.float32),
                tf.constant(wanted & (rng.random(shape) < 0.7)),
                tf.cast(wanted, tf.float32),
            )
        )
    return TokenChoiceRouting(tuple(assignments), EXPERTS, SLOTS)


def random_expert_choice(rng) -> ExpertChoiceRouting:
    """Returns a routing in which some slots are empty and some tokens are in several buffers."""
    order = np.argsort(rng.random((GROUPS, EXPERTS, TOKENS)), -1)[..., :SLOTS]
    slots = np.where(rng.random(order.shape) < 0.7, order, TOKENS)
    gates = np.where(slots < TOKENS, rng.uniform(0.1, 0.9, order.shape), 0.0)
    taken = [[(group == s).any() for s in range(TOKENS)] for group in slots]
    return ExpertChoiceRouting(
        tf.constant(slots, tf.int32),
        tf.constant(gates, tf.float32),
        tf.constant(taken),
        EXPERTS,
        SLOTS,
    )


def entries(routing):
    """Yields (group, token, expert, gate, whether it is kept) of every request."""
    if isinstance(routing, ExpertChoiceRouting):
        gates = routing.gate_of_slot_GEC.numpy()
        for (g, e, c), s in np.ndenumerate(routing.token_of_slot_GEC.numpy()):
            if s < TOKENS:
                yield g, s, e, gates[g, e, c], True
        return
    for a in routing.assignments:
        arrays = (a.expert_GS, a.gate_GS, a.kept_GS)
        experts, gates, kept = (x.numpy() for x in arrays)
        for g, s in np.argwhere(a.wanted_GS.numpy() > 0):
            yield g, s, experts[g, s], gates[g, s], kept[g, s]


class StatisticsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(random_token_choice, random_expert_choice)
    def test_all_are_those_of_a_loop_over_requests(self, make):
        rng = np.random.default_rng(2)
        routing = make(rng)
        mask = rng.random((GROUPS, TOKENS)) < 0.8
        gates = np.zeros((GROUPS, TOKENS, EXPERTS))
        load, gate_sums = np.zeros((2, EXPERTS))
        requests = met = 0
        for g, s, e, gate, is_kept in entries(routing):
            requests += 1
            if is_kept:
                gates[g, s, e] += gate
                gate_sums[e] += gate
                load[e] += 1
                met += 1
        assert_close(routing.token_gates(), gates, "float32")
        assert_close(routing.gate_sums(), gate_sums, "float32")
        self.assertAllEqual(routing.load(), load)
        if isinstance(routing, ExpertChoiceRouting):
            served = {(g, s) for g, s, *_ in entries(routing)}
            requests, met = mask.sum(), sum(mask[each] for each in served)
        mask_GS = tf.cast(mask, tf.float32)
        self.assertAllEqual(routing.requests(mask_GS), (requests, met))
        assert_close(routing.dropped_share(mask_GS), 1 - met / requests, "float32")

    def test_observations_are_those_of_a_loop_over_requests(self):
        rng = np.random.default_rng(3)
        routing, mask = random_token_choice(rng), rng.random((GROUPS, TOKENS)) < 0.8
        found = expert_observations(routing, tf.cast(mask, tf.float32))
        load, gates = np.zeros((2, EXPERTS))
        for _, _, e, gate, is_kept in entries(routing):
            load[e] += is_kept
            gates[e] += gate * is_kept
        self.assertAllEqual(found["load"](), load)
        assert_close(found["gate"](), gates, "float32")
        self.assertEqual(float(found["tokens"]()), mask.sum())
        self.assertEqual(float(found["slots"]()), GROUPS * EXPERTS * SLOTS)


class TokenGatesTest(testing.TestCase, parameterized.TestCase):
    """The gates of routers, as servers return them, from logits by loops over tokens."""

    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(5)
        shape = (GROUPS, TOKENS, EXPERTS)
        self.logits_GSE = rng.normal(size=shape).astype(np.float32)
        self.real_GS = rng.random(shape[:2]) < 0.8
        self.shares_GSE = algorithm.softmax(self.logits_GSE)

    def check(self, router, expected_GSE, **values):
        layer, theta = loops.make(router, EXPERTS, **values)
        routing = loops.route(layer, theta, self.logits_GSE, self.real_GS)
        assert_close(routing.token_gates(), expected_GSE, "float32")
        # Some tokens are not kept, and some have several experts.
        self.assertTrue(np.any((expected_GSE > 0).sum(-1)[self.real_GS] == 0))

    def gates_of(self, choices_of, slots):
        """Returns [G,S,E] after capacity; choices_of returns (expert, gate) pairs of a token."""
        expected = np.zeros(self.logits_GSE.shape)
        for g, shares_SE in enumerate(self.shares_GSE):
            choices = [choices_of(shares) for shares in shares_SE]
            for placed in loops.place(choices, self.real_GS[g], EXPERTS, slots):
                for s, entry in placed.items():
                    expected[g, s, entry.expert] += entry.gate
        return expected

    def test_top_2(self):
        expected = np.zeros(self.logits_GSE.shape)
        for g in range(GROUPS):
            group = algorithm.route(self.shares_GSE[g], self.real_GS[g], None, 2, "paper")
            for placed in (group.first, group.second):
                for s, entry in placed.items():
                    expected[g, s, entry.expert] += entry.gate * entry.kept
        self.check(Top2Router, expected, capacity_factor=0.375, second_expert="all")

    def test_top_1(self):
        expected = self.gates_of(lambda shares: [(shares.argmax(), shares.max())], 1)
        self.check(SwitchRouter, expected, capacity_factor=0.5, jitter=0.0)

    def test_top_k(self):
        def choices_of(shares):
            chosen = loops.top(shares, 2)
            return [(e, shares[e] / shares[chosen].sum()) for e in chosen]

        expected = self.gates_of(choices_of, 2)
        self.check(TopKRouter, expected, k=2, normalize=True, capacity_factor=0.375)

    def test_expert_choice(self):
        expected = np.zeros(self.logits_GSE.shape)
        for g, shares_SE in enumerate(self.shares_GSE):
            real = np.flatnonzero(self.real_GS[g])
            for e in range(EXPERTS):
                for s in sorted(real, key=lambda s, e=e: -shares_SE[s, e])[:2]:
                    expected[g, s, e] = shares_SE[s, e]
        self.check(ExpertChoiceRouter, expected, capacity_factor=0.75)


class LearnedRoutersTest(testing.TestCase):
    def test_a_router_is_learned_if_it_has_weights(self):
        for name in [each for each in vars(routers) if each.endswith("Router")]:
            cls = getattr(routers, name)
            sizes = {"num_experts": 4, "model_dim": 0 if name == "HashRouter" else 8}
            layer = cls.params().set(**sizes).instantiate(path="router")
            self.assertEqual(cls.is_learned, bool(layer.variable_specs().flatten()), name)


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
        weights = {name: float(weight) for name, (_, weight) in found.items()}
        tokens = mask.sum()
        self.assertEqual(weights["load_max_over_mean"], tokens)
        self.assertEqual(weights["dropped_share"], np.sum(wanted))
        self.assertEqual(weights["utilization"], 2 * experts * 8)
        self.assertEqual(weights["dead_experts"], tokens)

    def test_an_expert_without_tokens_is_dead_and_one_with_a_token_is_not(self):
        loads = np.array([0, 1, 5, 0, 2])
        experts = np.repeat(np.arange(5), loads)[None]
        kept = tf.ones(experts.shape, tf.bool)
        ones = tf.ones(experts.shape)
        assignment = Assignment(tf.constant(experts, tf.int32), ones, ones, kept, ones)
        found = load_metrics(TokenChoiceRouting((assignment,), 5, 8), ones)
        self.assertEqual(float(found["dead_experts"][0]), 2)
        assert_close(found["load_max_over_mean"][0], 5 / loads.mean(), "float32")

    def test_losses_and_metrics_of_a_router_are_reported_by_tokens(self):
        rng = np.random.default_rng(6)
        routing = dataclasses.replace(
            random_token_choice(rng),
            losses={"balance": WeightedLoss(tf.constant(3.0), 0.25)},
            metrics={"entropy": tf.constant(0.5)},
        )
        mask = rng.random((GROUPS, TOKENS)) < 0.8
        layer = mock.Mock()
        report(layer, routing, tf.cast(mask, tf.float32), Groups(GROUPS, TOKENS, TOKENS))
        ((name, loss),) = [call.args[:2] for call in layer.add_loss.call_args_list]
        self.assertEqual((name, float(loss)), ("balance", 0.75))
        metrics = {call.args[0]: call.args[1:] for call in layer.add_metric.call_args_list}
        self.assertAllEqual(metrics["balance"], (3.0, mask.sum()))
        self.assertAllEqual(metrics["entropy"], (0.5, mask.sum()))
        observed = {call.args[0]: call.args[1]() for call in layer.observe_named.call_args_list}
        self.assertAllEqual(observed["token_gates"], routing.token_gates())
        self.assertAllEqual(observed["load"], routing.load())

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
