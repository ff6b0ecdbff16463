"""Compares expert choice with loops over experts, and tests its options and errors."""

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
from lingvo_gshard.layers.moe.routing import ExpertChoiceRouting
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import ExpertChoiceRouter
from tests.layers.moe import algorithm
from tests.layers.moe.dispatch_names import dispatch_params

LOGITS = np.random.default_rng(4).normal(size=(2, 9, 4)).astype(np.float32)


def make(experts: int = 4, **values) -> tuple[ExpertChoiceRouter, NestedMap]:
    """Returns a router whose logits equal its inputs."""
    params = ExpertChoiceRouter.params().set(model_dim=experts, num_experts=experts, **values)
    return params.instantiate(path="router"), NestedMap(w_gate=tf.eye(experts))


def route(layer, theta, logits=LOGITS, real=None, training=False) -> ExpertChoiceRouting:
    logits = tf.convert_to_tensor(logits)
    mask = tf.ones(logits.shape[:2]) if real is None else tf.cast(real, tf.float32)
    with context.scope(training=training, seed=tf.constant([1, 0])):
        return layer.fprop(theta, logits, mask)


def choices_of(gates_S: np.ndarray, real_S: np.ndarray, slots: int) -> list[int]:
    """Returns the tokens of one expert in descending order of score."""
    left = [s for s in range(len(gates_S)) if real_S[s]]
    chosen = []
    while left and len(chosen) < slots:
        best = left[0]
        for s in left:
            if gates_S[s] > gates_S[best]:
                best = s
        left.remove(best)
        chosen.append(best)
    return chosen


def make_layer(dispatch: str = "gather", is_causal: bool = False, **values) -> MixtureOfExperts:
    params = MixtureOfExperts.params().set(
        model_dim=4, hidden_dim=5, num_experts=4, group_size=9, dispatch=dispatch_params(dispatch)
    )
    params.set(router=ExpertChoiceRouter.params().set(**values), is_causal=is_causal)
    return params.instantiate(path="moe")


# Another value for each option, and whether it has an effect only in training.
OPTIONS = {
    "capacity_factor": (1.0, False),
    "evaluation_capacity_factor": (4.0, False),
    "minimum_capacity": (7, False),
    "jitter": (0.5, True),
    "use_bias": (True, False),
    "z_loss_weight": (0.1, False),
    "dtype": ("bfloat16", False),
}


class ExpertChoiceTest(testing.TestCase, parameterized.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        tokens=st.integers(1, 10),
        experts=st.integers(2, 5),
        factor=st.sampled_from([0.3, 1.0, 2.0]),
        minimum=st.sampled_from([1, 3]),
        share=st.sampled_from([0.0, 0.6, 1.0]),
        seed=st.integers(0, 2**32),
    )
    def test_equals_a_loop_over_experts(self, tokens, experts, factor, minimum, share, seed):
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=(2, tokens, experts)).astype(np.float32)
        real = rng.random((2, tokens)) < share
        layer, theta = make(experts, capacity_factor=factor, minimum_capacity=minimum)
        routing = route(layer, theta, logits, real)
        slots = min(max(int(tokens * factor / experts), minimum), tokens)
        self.assertEqual(routing.capacity, slots)
        gates = algorithm.softmax(logits)
        taken, load = np.zeros((2, tokens), bool), np.zeros(experts)
        for g in range(2):
            for e in range(experts):
                chosen = choices_of(gates[g, :, e], real[g], slots)
                empty = [tokens] * (slots - len(chosen))
                self.assertAllEqual(routing.token_of_slot_GEC[g, e], chosen + empty)
                expected = [gates[g, s, e] for s in chosen] + [0.0] * len(empty)
                assert_close(routing.gate_of_slot_GEC[g, e], expected, "float32")
                taken[g, chosen] = True
                load[e] += len(chosen)
        self.assertAllEqual(routing.is_taken_GS, taken)
        self.assertAllEqual(routing.load(), load)
        found = load_metrics(routing, tf.cast(real, tf.float32))
        dropped = (real & ~taken).sum() / real.sum() if real.any() else 1.0
        assert_close(found["dropped_share"][0], dropped, "float32")
        assert_close(found["utilization"][0], load.sum() / (2 * experts * slots), "float32")

    def test_the_gradient_of_the_gates_is_the_softmax_gradient(self):
        rng = np.random.default_rng(1)
        layer, theta = make()
        x = tf.constant(LOGITS)
        weights = rng.normal(size=(2, 4, 4)).astype(np.float32)
        with tf.GradientTape() as tape:
            tape.watch(x)
            routing = route(layer, theta, x)
            total = tf.reduce_sum(routing.gate_of_slot_GEC * weights)
        gates = algorithm.softmax(LOGITS)
        d_gates = np.zeros(gates.shape)
        for (g, e, c), s in np.ndenumerate(routing.token_of_slot_GEC.numpy()):
            d_gates[g, s, e] = weights[g, e, c]
        expected = gates * (d_gates - (gates * d_gates).sum(-1, keepdims=True))
        assert_close(tape.gradient(total, x), expected, "float32")

    def test_ties_go_to_the_earlier_token(self):
        layer, theta = make(capacity_factor=1.0)
        routing = route(layer, theta, np.zeros((1, 8, 4), np.float32))
        self.assertAllEqual(routing.token_of_slot_GEC, np.tile([0, 1], (1, 4, 1)))
        self.assertEqual(float(routing.dropped_share(tf.ones([1, 8]))), 0.75)

    def test_evaluation_capacity_can_hold_all_tokens(self):
        layer, theta = make(evaluation_capacity_factor=4.0)
        self.assertEqual(route(layer, theta).capacity, 9)
        self.assertEqual(route(layer, theta, training=True).capacity, 4)

    @parameterized.parameters("gather", "einsum")
    def test_the_layer_output_is_a_sum_over_experts(self, dispatch):
        layer = make_layer(dispatch)
        theta = layer.init(1)
        mask = np.arange(9) < [[9], [6]]
        y = layer.fprop(theta, tf.constant(LOGITS), tf.constant(mask, tf.int32))
        w_gate, w_in, w_out = (
            w.numpy().astype(np.float64)
            for w in (theta.router.w_gate, theta.experts.w_in, theta.experts.w_out)
        )
        gates, expected = algorithm.softmax(LOGITS @ w_gate), np.zeros(LOGITS.shape)
        for g in range(2):
            for e in range(4):
                for s in choices_of(gates[g, :, e], mask[g], 4):
                    hidden = np.maximum(LOGITS[g, s] @ w_in[e], 0)
                    expected[g, s] += gates[g, s, e] * (hidden @ w_out[e])
        assert_close(y, expected, "float32")
        self.assertFalse(np.any(y[1, 6:]))

    def test_every_option_has_a_test_value(self):
        names = {name for name, _ in ExpertChoiceRouter.params().items()}
        set_by_the_layer = {"model_dim", "num_experts", "is_causal", "is_dropless"}
        self.assertEqual(names - set_by_the_layer - {"allow_causal"}, OPTIONS.keys())

    @parameterized.parameters(*OPTIONS)
    def test_every_option_has_an_effect(self, name):
        value, training = OPTIONS[name]

        def outcome(**values) -> list[np.ndarray]:
            layer = make_layer(**values)
            # Biases begin at 0, which has no effect.
            theta = layer.init(1).transform(
                lambda w: w + 0.1 * tf.range(w.shape[-1], dtype=w.dtype)
            )
            with context.scope(training=training, seed=tf.constant([1, 0])) as scope:
                y = layer.fprop(theta, tf.constant(LOGITS), np.ones((2, 9)))
            return [y.numpy(), *(loss.numpy() for loss in scope.losses.values())]

        one, other = outcome(), outcome(**{name: value})
        self.assertTrue(len(one) != len(other) or not all(map(np.array_equal, one, other)))

    @parameterized.parameters(
        ({"capacity_factor": 5.0}, "router.capacity_factor: 5 experts .* router.num_experts=4"),
        (
            {"evaluation_capacity_factor": 4.5},
            "router.evaluation_capacity_factor: 4.5; 0 to 4 was expected",
        ),
    )
    def test_rejects_invalid_options(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            make(**values)

    def test_causal_layers_require_the_opt_in(self):
        with self.assertRaisesRegex(ValueError, "moe.router: ExpertChoiceRouter .* is_causal"):
            make_layer(is_causal=True)
        make_layer(is_causal=True, allow_causal=True)

    def test_decoders_require_the_opt_in(self):
        router = ExpertChoiceRouter.params()
        params = TransformerStack.params().set(
            num_layers=2, model_dim=4, num_heads=1, hidden_dim=4, is_decoder=True
        )
        params.moe.set(num_experts=4, router=router)
        with self.assertRaisesRegex(ValueError, "ExpertChoiceRouter .*allow_causal"):
            params.instantiate(path="decoder")
        params.moe.router.allow_causal = True
        params.instantiate(path="decoder")

    def test_dropless_dispatch_rejects_expert_choice(self):
        with self.assertRaisesRegex(
            ValueError, "moe.router: ExpertChoiceRouter limits .* dropless"
        ):
            make_layer("dropless")


if __name__ == "__main__":
    testing.main()
