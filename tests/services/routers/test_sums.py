# tests: wings/services/routers/sums.py, layers/moe/load_metrics.py
"""Tests what watched routers report, against loops over the tokens."""

import math

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import SwitchRouter, Top2Router, TopKRouter
from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import (
    ExpertChoiceRouter,
    ForcedBalanceRouter,
    HashRouter,
    SigmoidRouter,
    SinkhornRouter,
)
from lingvo_gshard.wings.services.routers.sums import WatchedKinds, _by_part, watched_sums

GROUPS, TOKENS, MODEL, EXPERTS = 3, 16, 8, 4
KINDS = WatchedKinds(languages=3, classes=2)
IN_GROUPS = Groups(rows=GROUPS, length=TOKENS, size=TOKENS)
ROUTERS = {
    "top2": Top2Router.params(),
    "top2 of lingvo": Top2Router.params().set(mode="lingvo", second_expert="all"),
    "switch": SwitchRouter.params().set(capacity_factor=0.5),
    "top 3": TopKRouter.params().set(k=3, capacity_factor=0.7),
    "sigmoid": SigmoidRouter.params().set(auxiliary_loss_weight=0.1),
    "sinkhorn": SinkhornRouter.params(),
    "hash": HashRouter.params(),
    "forced": ForcedBalanceRouter.params().set(skew=0.5),
    "expert choice": ExpertChoiceRouter.params().set(capacity_factor=1.5),
}


def route(params, x_GSM, mask_GS, seed=0):
    """Returns a router and the routing of tokens in training."""
    has_model = HashRouter.params().cls is not params.cls
    sizes = {"num_experts": EXPERTS} | ({"model_dim": MODEL} if has_model else {})
    router = params.copy().set(**sizes).instantiate(path="moe.router")
    theta = router.init(1)
    ids_GS = tf.cast(tf.reduce_sum(tf.abs(x_GSM), -1) * 1000, tf.int32)
    with context.scope(training=True, seed=tf.constant([seed, 1])):
        return router, router.fprop(theta, x_GSM, mask_GS, ids_GS)


def requests(routing):
    """Yields (group, token, expert, whether it is kept) of every choice."""
    if hasattr(routing, "assignments"):
        for a in routing.assignments:
            arrays = [x.numpy() for x in (a.expert_GS, a.kept_GS, a.wanted_GS)]
            for g, s in np.argwhere(arrays[2] > 0):
                yield g, s, arrays[0][g, s], arrays[1][g, s]
        return
    slots = routing.token_of_slot_GEC.numpy()
    for g, e, c in np.argwhere(slots < TOKENS):
        yield g, slots[g, e, c], e, True


class WatchedTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(*ROUTERS)
    def test_sums_are_those_of_a_loop_over_tokens(self, name):
        rng = np.random.default_rng(1)
        x_GSM = tf.constant(rng.normal(size=(GROUPS, TOKENS, MODEL)), tf.float32)
        mask = rng.random((GROUPS, TOKENS)) < 0.8
        kinds = rng.integers(0, KINDS.languages * KINDS.classes, mask.shape)
        mask_GS = tf.cast(mask, tf.float32)
        _, routing = route(ROUTERS[name], x_GSM, mask_GS)
        sums = watched_sums(routing, mask_GS, tf.constant(kinds, tf.int32), KINDS, IN_GROUPS)
        found = {key: value.numpy() for key, value in sums.items()}

        choices, kept = np.zeros(EXPERTS), np.zeros(EXPERTS)
        languages = np.zeros((KINDS.languages, EXPERTS))
        classes = np.zeros((KINDS.classes, EXPERTS))
        by_group = np.zeros((GROUPS, EXPERTS))
        served = set()
        for g, s, expert, is_kept in requests(routing):
            self.assertTrue(mask[g, s])
            choices[expert] += 1
            by_group[g, expert] += 1
            kept[expert] += is_kept
            languages[kinds[g, s] // KINDS.classes, expert] += 1
            classes[kinds[g, s] % KINDS.classes, expert] += 1
            served.add((g, s))
        self.assertGreater(choices.sum(), 0)
        self.assertAllEqual(found["choices"], choices)
        self.assertAllEqual(found["kept"], kept)
        self.assertAllEqual(found["by_part"], by_group)
        self.assertAllEqual(found["by_language"], languages)
        self.assertAllEqual(found["by_class"], classes)
        by_expert = (mask.sum(), mask.sum(), len(served))
        by_token = (mask.sum(), choices.sum(), kept.sum())
        expected = by_expert if name == "expert choice" else by_token
        self.assertAllEqual(found["tokens"], expected)
        self.assertEqual(found["batches"], 1)

    @parameterized.product(
        capacity_factor=[0.25, 0.5, 1.0, 2.0],
        name=["top2", "top2 of lingvo", "top 3", "hash", "forced"],
    )
    def test_positions_tell_what_any_capacity_drops(self, name, capacity_factor):
        """One routing's positions give the dropped tokens of routings with other capacities."""
        rng = np.random.default_rng(3)
        x_GSM = tf.constant(rng.normal(size=(GROUPS, TOKENS, MODEL)), tf.float32)
        mask_GS = tf.cast(rng.random((GROUPS, TOKENS)) < 0.8, tf.float32)
        _, first = route(ROUTERS[name].copy().set(capacity_factor=1.3), x_GSM, mask_GS)
        given = ROUTERS[name].copy().set(capacity_factor=capacity_factor)
        _, other = route(given, x_GSM, mask_GS)
        sums = watched_sums(first, mask_GS, None, KINDS, IN_GROUPS)
        dropped = sum(not is_kept for *_, is_kept in requests(other))
        self.assertEqual(sums["positions"].numpy()[other.capacity :].sum(), dropped)
        self.assertEqual(sums["positions"].numpy().sum(), len(list(requests(other))))
        slots = GROUPS * EXPERTS * first.capacity
        self.assertAllEqual(sums["groups"], [GROUPS, GROUPS * TOKENS, slots])

    def test_parts_of_many_groups_are_equal_and_in_the_order_of_rows(self):
        choices_GE = np.random.default_rng(4).integers(0, 9, (6, 2048)).astype(np.float32)
        parts = _by_part(tf.constant(choices_GE)).numpy()
        self.assertAllEqual(parts, [choices_GE[:3].sum(0), choices_GE[3:].sum(0)])
        # So many experts leave one part, whatever the number of groups.
        choices_GE = np.ones((3, 5000), np.float32)
        self.assertAllEqual(_by_part(tf.constant(choices_GE)), choices_GE.sum(0, keepdims=True))
        # Two rows of four groups, stored in two pieces: first the groups of all first halves.
        stored = tf.constant([0, 1, 4, 5, 2, 3, 6, 7])
        groups = Groups(rows=2, length=64, size=16, pieces=2)
        self.assertAllEqual(groups.in_order(stored), np.arange(8))

    def test_entropy_and_balance_loss_are_those_of_a_loop_over_tokens(self):
        rng = np.random.default_rng(2)
        x_GSM = tf.constant(rng.normal(size=(GROUPS, TOKENS, MODEL)), tf.float32)
        mask = rng.random((GROUPS, TOKENS)) < 0.8
        router, routing = route(Top2Router.params(), x_GSM, tf.cast(mask, tf.float32))
        weight = router.init(1).w_gate.numpy().astype(np.float64)
        entropy, loss = 0.0, 0.0
        for g in range(GROUPS):
            first, gate_sum = np.zeros(EXPERTS), np.zeros(EXPERTS)
            for s in np.flatnonzero(mask[g]):
                logits = x_GSM[g, s].numpy() @ weight
                gates = np.exp(logits) / np.exp(logits).sum()
                entropy -= sum(gate * math.log(gate) for gate in gates)
                first[gates.argmax()] += 1
                gate_sum += gates
            # Algorithm 1 of arXiv 2006.16668: the mean over experts of c_e / S * m_e.
            loss += np.mean(first / mask[g].sum() * gate_sum / mask[g].sum()) / GROUPS
        sums = watched_sums(routing, tf.cast(mask, tf.float32), None, KINDS, IN_GROUPS)
        assert_close(sums["entropy"], entropy, "float32")
        assert_close(sums["balance"], loss, "float32")
        self.assertNotIn("by_class", sums)
        self.assertNotIn("by_language", sums)

    @parameterized.parameters("top2", "top2 of lingvo", "switch", "top 3", "sigmoid")
    def test_even_loads_have_the_balance_loss_of_the_floor(self, name):
        # Token s prefers expert s, then s + 1, ... modulo E. Every expert is like every other.
        preference = np.array(
            [[-((e - s) % EXPERTS) for e in range(EXPERTS)] for s in range(TOKENS)]
        )
        params = ROUTERS[name].copy().set(model_dim=EXPERTS, num_experts=EXPERTS, jitter=0.0)
        router = params.instantiate(path="moe.router")
        theta = router.init(1)
        theta.w_gate = tf.eye(EXPERTS)
        x_GSM = tf.constant(preference[None], tf.float32)
        with context.scope(training=True, seed=tf.constant([0, 1])):
            routing = router.fprop(theta, x_GSM, tf.ones(x_GSM.shape[:2]))
        assert_close(routing.losses["auxiliary_loss"].value, router.balance_floor, "float32")

    @parameterized.parameters("sinkhorn", "hash", "forced", "expert choice")
    def test_a_router_without_a_balance_loss_has_no_floor(self, name):
        router, routing = route(ROUTERS[name], tf.ones([1, TOKENS, MODEL]), tf.ones([1, TOKENS]))
        self.assertIsNone(router.balance_floor)
        self.assertNotIn("auxiliary_loss", routing.losses)
        params = SigmoidRouter.params().set(model_dim=MODEL, num_experts=EXPERTS)
        self.assertIsNone(params.instantiate(path="moe.router").balance_floor)


if __name__ == "__main__":
    testing.main()
