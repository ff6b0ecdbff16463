"""Compares the top-2 router with Algorithm 1 token by token, and tests its properties."""

import dataclasses
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.routers.top2 import Top2Router
from lingvo_gshard.layers.moe.routing import Routing
from lingvo_gshard.testing.layers import assert_close
from tests.layers.moe import algorithm
from tests.layers.moe.routers import loops

MODES = ("paper", "lingvo")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Logits [G,S,E] without near ties, the mask of real tokens, and the random numbers."""

    logits_GSE: np.ndarray
    real_GS: np.ndarray
    drawn_GS: np.ndarray
    capacity_factor: float
    training: bool
    second_expert: str


@st.composite
def problems(draw) -> Problem:
    groups, tokens, experts = draw(
        st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(2, 6))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.02, 0.5, 3.0]))
    places = rng.permuted(np.tile(np.arange(experts), (groups, tokens, 1)), axis=-1)
    favorite = np.arange(experts) * draw(st.sampled_from([0.0, 1.25]))
    return Problem(
        logits_GSE=((places + favorite) * spread).astype(np.float32),
        real_GS=rng.random((groups, tokens)) < draw(st.sampled_from([0.0, 0.6, 1.0])),
        drawn_GS=rng.random((groups, tokens)).astype(np.float32),
        capacity_factor=draw(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.7, 6.0])),
        training=draw(st.booleans()),
        second_expert=draw(st.sampled_from(["random", "all"])),
    )


def make(experts: int, **values) -> tuple[Top2Router, NestedMap]:
    """Returns a router whose logits equal its inputs."""
    params = Top2Router.params().set(model_dim=experts, num_experts=experts, **values)
    return params.instantiate(path="router"), NestedMap(w_gate=tf.eye(experts))


def route(layer, theta, logits, real=None, training=False, seed=1) -> Routing:
    logits = tf.convert_to_tensor(logits)
    mask = tf.ones(logits.shape[:2]) if real is None else tf.cast(real, tf.float32)
    with context.scope(training=training, seed=tf.constant([seed, 0])):
        return layer.fprop(theta, logits, mask)


def auxiliary_loss(routing: Routing) -> tf.Tensor:
    return routing.losses["auxiliary_loss"].value


class Top2Test(testing.TestCase, parameterized.TestCase):
    def assert_same_choice(self, choice, entries: dict, group: int, tokens: int) -> None:
        """Asserts that one choice in one group equals the entries of Algorithm 1."""
        for s in range(tokens):
            gate, kept = float(choice.gate_GS[group, s]), bool(choice.kept_GS[group, s])
            if s not in entries:
                self.assertEqual((gate, kept), (0.0, False))
                continue
            expected = entries[s]
            self.assertEqual(int(choice.expert_GS[group, s]), expected.expert)
            self.assertEqual(kept, expected.kept)
            self.assertEqual(int(choice.position_GS[group, s]), expected.position)
            assert_close(gate, expected.gate if expected.kept else 0.0, "float32")

    @parameterized.parameters(*MODES)
    @hypothesis.settings(deadline=None)
    @hypothesis.given(problem=problems())
    def test_matches_algorithm_1(self, mode, problem):
        groups, tokens, experts = problem.logits_GSE.shape
        layer, theta = make(
            experts,
            mode=mode,
            capacity_factor=problem.capacity_factor,
            second_expert=problem.second_expert,
        )
        drawn = mock.patch.object(
            random_numbers, "hashed_uniform", lambda *_: tf.constant(problem.drawn_GS)
        )
        with drawn:
            routing = route(layer, theta, problem.logits_GSE, problem.real_GS, problem.training)
        slots = algorithm.capacity(tokens, experts, 2 * problem.capacity_factor, mode)
        is_random = problem.training and problem.second_expert == "random"
        losses = []
        for g in range(groups):
            expected = algorithm.route(
                algorithm.softmax(problem.logits_GSE[g]),
                problem.real_GS[g],
                problem.drawn_GS[g] if is_random else None,
                slots,
                mode,
            )
            self.assert_same_choice(routing.assignments[0], expected.first, g, tokens)
            self.assert_same_choice(routing.assignments[1], expected.second, g, tokens)
            losses.append(expected.auxiliary_loss)
        assert_close(
            auxiliary_loss(routing), loops.mean_of_groups(losses, problem.real_GS), "float32"
        )
        self.assertEqual(routing.num_experts, experts)
        self.assertGreaterEqual(routing.capacity, min(slots, tokens))
        self.assertLessEqual(routing.capacity, slots)

    @parameterized.parameters(*MODES)
    def test_ties_go_to_the_earlier_expert(self, mode):
        layer, theta = make(4, mode=mode, capacity_factor=4.0)
        routing = route(layer, theta, np.zeros((1, 3, 4), np.float32))
        self.assertAllEqual(routing.assignments[0].expert_GS, [[0, 0, 0]])
        self.assertAllEqual(routing.assignments[1].expert_GS, [[1, 1, 1]])
        self.assertAllEqual(routing.assignments[1].position_GS, [[0, 1, 2]])

    @parameterized.parameters(("paper", 1 / 16), ("lingvo", 1.0))
    def test_uniform_routing_minimizes_the_loss(self, mode, expected):
        layer, theta = make(4, mode=mode)
        rotated = np.stack([np.roll([3.0, 2, 1, 0], s) for s in range(8)])[None].astype(np.float32)
        assert_close(auxiliary_loss(route(layer, theta, rotated)), expected, "float32")
        one_sided = np.tile(np.array([3.0, 2, 1, 0], np.float32), (1, 8, 1))
        self.assertGreater(float(auxiliary_loss(route(layer, theta, one_sided))), 1.5 * expected)

    @parameterized.parameters(*MODES)
    def test_padding_takes_no_capacity_slot(self, mode):
        rng = np.random.default_rng(1)
        layer, theta = make(3, mode=mode, capacity_factor=0.5)
        real_logits = rng.normal(size=(1, 5, 3)).astype(np.float32)
        padded = np.concatenate([np.full((1, 5, 3), 9.0, np.float32), real_logits], axis=1)
        real = np.array([[False] * 5 + [True] * 5])
        layer_alone, _ = make(3, mode=mode, capacity_factor=1.0)
        unpadded = route(layer_alone, theta, real_logits)
        routing = route(layer, theta, padded, real)
        for choice, expected in zip(routing.assignments, unpadded.assignments, strict=True):
            self.assertAllEqual(choice.position_GS[:, 5:], expected.position_GS)
            self.assertAllClose(choice.gate_GS[:, 5:], expected.gate_GS, rtol=1e-6, atol=0)
            self.assertFalse(tf.reduce_any(choice.kept_GS[:, :5]))
        assert_close(auxiliary_loss(routing), auxiliary_loss(unpadded), "order")

    @parameterized.parameters(*MODES)
    def test_positions_beyond_256_are_exact_in_bfloat16(self, mode):
        tokens = 1000
        layer, theta = make(4, mode=mode, capacity_factor=4.0)
        logits = tf.cast(np.tile([3.0, 2, 1, 0], (1, tokens, 1)), tf.bfloat16)
        for choice in route(layer, theta, logits).assignments:
            self.assertAllEqual(choice.position_GS[0], np.arange(tokens))
            self.assertEqual(choice.position_GS.dtype, tf.int32)
            self.assertEqual(choice.gate_GS.dtype, tf.float32)
            self.assertTrue(tf.reduce_all(choice.kept_GS))

    @parameterized.parameters(*MODES)
    def test_the_second_expert_is_used_with_twice_its_gate_as_probability(self, mode):
        tokens = 4096
        rng = np.random.default_rng(1)
        layer, theta = make(4, mode=mode, capacity_factor=4.0)
        logits = rng.normal(size=(1, tokens, 4)).astype(np.float32) * 2
        everyone = route(layer, theta, logits).assignments[1].gate_GS.numpy()
        routing = route(layer, theta, logits, training=True)
        wanted = routing.assignments[1].kept_GS.numpy()
        assert_close(wanted.mean(), np.minimum(1, 2 * everyone).mean(), "sampling")
        likely = everyone > 0.4
        self.assertGreater(wanted[likely].mean(), wanted[~likely].mean())
        self.assertTrue(tf.reduce_all(routing.assignments[0].kept_GS))

    @parameterized.parameters(*MODES)
    def test_draws_depend_on_the_seed_in_training_only(self, mode):
        logits = np.random.default_rng(1).normal(size=(2, 32, 4)).astype(np.float32)
        layer, theta = make(4, mode=mode)

        def dispatched(training: bool, seed: int) -> np.ndarray:
            routing = route(layer, theta, logits, training=training, seed=seed)
            return routing.assignments[1].kept_GS.numpy()

        self.assertAllEqual(dispatched(True, 1), dispatched(True, 1))
        self.assertNotAllEqual(dispatched(True, 1), dispatched(True, 2))
        self.assertAllEqual(dispatched(False, 1), dispatched(False, 2))

    @parameterized.product(mode=MODES, threshold=[0.0, 0.2, 0.4, 1.0], training=[True, False])
    def test_the_threshold_policy_uses_second_experts_with_larger_gates(
        self, mode, threshold, training
    ):
        logits = np.random.default_rng(1).normal(size=(2, 32, 4)).astype(np.float32) * 2
        values = {"capacity_factor": 4.0, "second_expert_threshold": threshold}
        layer, theta = make(4, mode=mode, second_expert="threshold", **values)
        second = route(layer, theta, logits, training=training).assignments[1]
        gates = np.sort(algorithm.softmax(logits), -1)
        share = gates[..., -2] / (gates[..., -1] + gates[..., -2])
        self.assertAllEqual(second.kept_GS, share >= threshold)
        assert_close(second.gate_GS, np.where(share >= threshold, share, 0), "float32")

    @parameterized.parameters(*MODES)
    def test_gates_sum_to_one_if_both_choices_have_a_slot(self, mode):
        logits = np.random.default_rng(1).normal(size=(2, 9, 4)).astype(np.float32)
        layer, theta = make(4, mode=mode, capacity_factor=4.0)
        first, second = route(layer, theta, logits).assignments
        assert_close(first.gate_GS + second.gate_GS, np.ones((2, 9)), "float32")

    def test_no_gradient_flows_through_the_load(self):
        """The gradient of the auxiliary loss flows only through the mean gates."""
        logits = np.random.default_rng(1).normal(size=(1, 6, 3)).astype(np.float32)
        layer, theta = make(3)
        x = tf.constant(logits)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = auxiliary_loss(route(layer, theta, x))
        gates = algorithm.softmax(logits)[0]
        load = np.bincount(gates.argmax(-1), minlength=3) / 6
        expected = gates * (load - (gates * load).sum(-1, keepdims=True)) / (3 * 6)
        assert_close(tape.gradient(loss, x)[0], expected, "float32", least_scale=1e-6)

    @parameterized.parameters(
        ({"num_experts": 1}, "router: 2 experts per token, but router.num_experts=1"),
        ({"mode": "papre"}, "Top2Router.mode is 'papre'; expected 'paper' or 'lingvo'"),
        ({"second_expert": "randm"}, "second_expert is 'randm'; expected 'random', 'thres"),
    )
    def test_rejects_invalid_options(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            params = Top2Router.params().set(model_dim=4, num_experts=4).set(**values)
            params.instantiate(path="router")


if __name__ == "__main__":
    testing.main()
