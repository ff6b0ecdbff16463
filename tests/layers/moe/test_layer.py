# tests: layers/moe/layer.py, layers/moe/shared_expert.py
"""Compares the mixture-of-experts layer with loops over tokens, and tests its options."""

import functools
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import (
    EinsumDispatch,
    MixtureOfExperts,
    SwitchRouter,
    Top2Router,
    groups,
)
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.published_layers.routers import ExpertChoiceRouter
from tests.layers.moe import algorithm
from tests.layers.moe.dispatch_names import dispatch_params

B, L, M, H, E = 3, 8, 4, 6, 4
X = np.random.default_rng(1).normal(size=(B, L, M)).astype(np.float32)
MASK = np.ones((B, L), np.int32)


def make_params(**values):
    """Returns Params; router_<name> and experts_<name> set options of the router and experts."""
    params = MixtureOfExperts.params().set(model_dim=M, hidden_dim=H, num_experts=E, group_size=8)
    for name, value in values.items():
        child, _, rest = name.partition("_")
        if child in ("router", "experts"):
            setattr(params.get(child), rest, value)
        else:
            setattr(params, name, value)
    return params


def run(params, x=X, mask=MASK, training=False, seed=1):
    """Returns the output, the context, and the layer's weights."""
    layer = params.instantiate(path="moe")
    theta = layer.init(1)
    with context.scope(training=training, seed=tf.constant([seed, 0])) as scope:
        y = layer.fprop(theta, tf.convert_to_tensor(x), tf.constant(mask))
    return y, scope, theta


def reference(theta, x_SM, real_S, slots: int, mode: str = "paper") -> np.ndarray:
    """Returns the output of one group: the sum of gate * expert(x) over a token's experts."""
    w_gate, w_in, w_out = (
        w.numpy().astype(np.float64)
        for w in (theta.router.w_gate, theta.experts.w_in, theta.experts.w_out)
    )
    group = algorithm.route(algorithm.softmax(x_SM @ w_gate), real_S, None, slots, mode)
    y_SM = np.zeros(x_SM.shape)
    for entries in (group.first, group.second):
        for s, entry in entries.items():
            if entry.kept:
                hidden = np.maximum(x_SM[s] @ w_in[entry.expert], 0)
                y_SM[s] += entry.gate * (hidden @ w_out[entry.expert])
    return y_SM


def fingerprint(params, training: bool) -> tuple:
    """Returns all observable properties of a layer: weights, outputs, losses and operations."""

    def traced():
        y, scope, theta = run(params, training=training)
        return [y, *scope.losses.values(), *theta.flatten()]

    function = tf.function(traced, autograph=False).get_concrete_function()
    operations = sorted({op.type for op in function.graph.get_operations()})
    values = [(v.dtype.name, tuple(v.shape), v.numpy().tobytes()) for v in function()]
    return operations, values


# Another valid value for each hyperparameter, and whether it has an effect only in training.
OPTIONS = {
    "hidden_dim": (H + 1, False),
    "num_experts": (E + 1, False),
    "group_size": (5, False),
    "dispatch": (EinsumDispatch.params(), False),
    "shared_hidden_dim": (3, False),
    "dtype": ("bfloat16", False),
    "experts_activation": ("swiglu", False),
    "experts_use_bias": (True, False),
    "experts_dropout_rate": (0.5, True),
    "experts_dtype": ("bfloat16", False),
    "router_mode": ("lingvo", False),
    "router_capacity_factor": (0.25, False),
    "router_evaluation_capacity_factor": (0.25, False),
    "router_minimum_capacity": (8, False),
    "router_priority": ("gate", False),
    "router_order": ("token", False),
    "router_output_masking_rate": (0.5, True),
    "router_jitter": (0.5, True),
    "router_use_bias": (True, False),
    "router_z_loss_weight": (0.1, False),
    "router_auxiliary_loss_weight": (0.02, False),
    "router_auxiliary_loss_level": ("batch", False),
    "router_second_expert": ("all", True),
    "router_dtype": ("bfloat16", False),
}
# Invalid values: sizes must match the input, and the layer sets those of its children.
INVALID = {
    "model_dim": M + 1,
    "router_model_dim": M + 1,
    "router_num_experts": E + 1,
    "experts_model_dim": M + 1,
    "experts_hidden_dim": H + 1,
    "experts_num_experts": E + 1,
}
# Tested elsewhere: options of other routers, and options that need a second option.
TESTED_ELSEWHERE = {
    "exchange",
    "gates_inputs",
    "shared_combination",
    "is_causal",
    "router_allow_causal",
    "has_token_ids",
    "router_is_causal",
    "router_is_dropless",
    "router_second_expert_threshold",
    "experts_gate_alpha",
    "experts_gate_limit",
    "experts_gate_offset",
}


@functools.cache
def fingerprint_of_defaults(training: bool) -> tuple:
    return fingerprint(make_params(), training)


class MixtureOfExpertsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.product(
        mode=["paper", "lingvo"], name=["gather", "einsum"], factor=[0.25, 0.5, 2.0]
    )
    def test_matches_the_formula(self, mode, name, factor):
        y, _, theta = run(
            make_params(
                router_mode=mode, dispatch=dispatch_params(name), router_capacity_factor=factor
            )
        )
        slots = algorithm.capacity(L, E, 2 * factor, mode)
        expected = [reference(theta, x, np.ones(L, bool), slots, mode) for x in X]
        assert_close(y, expected, "float32")

    @parameterized.parameters("gather", "einsum", "dropless")
    def test_gated_inputs_match_a_loop(self, name):
        """The experts have ReLU: a gate at their outputs would give the same, but for biases."""
        params = make_params(
            experts_use_bias=True, dispatch=dispatch_params(name), gates_inputs=True
        )
        params.router = SwitchRouter.params()
        params.router.capacity_factor = 0.0 if name == "dropless" else float(E)
        layer = params.instantiate(path="moe")
        theta = layer.init(1)
        rng = np.random.default_rng(2)
        for bias, size in (("b_in", H), ("b_out", M)):
            theta.experts[bias] = tf.constant(rng.normal(size=(E, size)), tf.float32)
        with context.scope():
            y = layer.fprop(theta, tf.constant(X), tf.constant(MASK))
        names = ("w_in", "b_in", "w_out", "b_out")
        w = {name: theta.experts[name].numpy().astype(np.float64) for name in names}
        expected = np.zeros(X.shape)
        for place in np.ndindex(B, L):
            scores = algorithm.softmax(X[place] @ theta.router.w_gate.numpy())
            expert = np.argmax(scores)
            hidden = scores[expert] * X[place] @ w["w_in"][expert] + w["b_in"][expert]
            expected[place] = np.maximum(hidden, 0) @ w["w_out"][expert] + w["b_out"][expert]
        assert_close(y, expected, "float32")

    def test_groups_span_rows_and_the_last_is_padded(self):
        y, _, theta = run(make_params(group_size=10))
        tokens = np.concatenate([X.reshape(B * L, M), np.zeros((6, M), np.float32)])
        real = np.arange(30) < B * L
        slices = [slice(i, i + 10) for i in (0, 10, 20)]
        expected = np.concatenate([reference(theta, tokens[g], real[g], 5) for g in slices])
        assert_close(np.reshape(y, (B * L, M)), expected[: B * L], "float32")

    def test_a_group_is_at_most_the_batch(self):
        y, _, theta = run(make_params(group_size=1000))
        expected = reference(theta, X.reshape(B * L, M), np.ones(B * L, bool), B * L * 2 // E)
        assert_close(np.reshape(y, (B * L, M)), expected, "float32")

    def test_dropped_tokens_and_padding_give_zero(self):
        mask = MASK.copy()
        mask[:, :2] = 0
        y, scope, _ = run(make_params(router_capacity_factor=0.25), mask=mask)
        self.assertFalse(np.any(y[:, :2]))
        taken = np.any(y.numpy(), axis=-1)
        self.assertTrue(np.any(taken[:, 2:]))
        self.assertFalse(np.all(taken[:, 2:]))
        self.assertGreater(float(scope.metrics["moe/dropped_share"][0]), 0.3)

    def test_evaluation_groups_and_drops_tokens_like_training(self):
        params = make_params(router_second_expert="all", router_capacity_factor=0.5, group_size=10)
        trained, trained_scope, _ = run(params, training=True)
        evaluated, scope, _ = run(params)
        self.assertAllEqual(trained, evaluated)
        self.assertGreater(float(scope.metrics["moe/dropped_share"][0]), 0)
        for name, (value, _) in scope.metrics.items():
            self.assertEqual(float(value), float(trained_scope.metrics[name][0]))

    def test_evaluation_is_deterministic_and_training_is_not(self):
        params = make_params()
        one, other = (run(params, seed=seed)[0] for seed in (1, 2))
        self.assertAllEqual(one, other)
        one, other = (run(params, seed=seed, training=True)[0] for seed in (1, 2))
        self.assertNotAllEqual(one, other)

    def test_reports_loss_and_metrics(self):
        _, scope, _ = run(make_params(router_auxiliary_loss_weight=0.5))
        value = float(scope.metrics["moe/auxiliary_loss"][0])
        self.assertGreaterEqual(value, 1 / E**2 * 0.9)
        self.assertEqual(float(scope.losses["moe/auxiliary_loss"]), 0.5 * value)
        self.assertEqual(
            set(scope.metrics),
            {
                "moe/auxiliary_loss",
                "moe/load_max_over_mean",
                "moe/dropped_share",
                "moe/utilization",
                "moe/dead_experts",
                "moe/router_entropy",
            },
        )

    def test_bfloat16_activations_are_routed_in_float32(self):
        rounded = tf.cast(X, tf.bfloat16)
        y, scope, _ = run(make_params(), x=rounded)
        exact, exact_scope, _ = run(make_params(), x=tf.cast(rounded, tf.float32))
        self.assertEqual(y.dtype, tf.bfloat16)
        assert_close(tf.cast(y, tf.float32), exact, "bfloat16")
        for name, (value, _) in scope.metrics.items():
            self.assertEqual(float(value), float(exact_scope.metrics[name][0]))

    def test_every_option_has_a_test_value(self):
        names = {name for name, _ in MixtureOfExperts.params().items()}
        names |= {f"router_{name}" for name, _ in Top2Router.params().items()}
        names |= {f"experts_{name}" for name, _ in Experts.params().items()}
        names -= {"router", "experts"} | TESTED_ELSEWHERE
        self.assertEqual(names, OPTIONS.keys() | INVALID.keys())

    @parameterized.parameters(*OPTIONS)
    def test_every_option_has_an_effect(self, name):
        value, training = OPTIONS[name]
        changed = fingerprint(make_params(**{name: value}), training)
        self.assertNotEqual(changed, fingerprint_of_defaults(training))

    @parameterized.parameters(*INVALID)
    def test_rejects_inconsistent_sizes(self, name):
        with self.assertRaisesRegex(ValueError, r"'M' has sizes 4 and 5|moe.\w+.\w+: \d, but moe"):
            run(make_params(**{name: INVALID[name]}))

    @parameterized.parameters(
        (
            {"dispatch": "gather"},
            r"moe.dispatch: 'gather' is not Params; .* GatherDispatch.params\(\)",
        ),
        ({"experts_activation": "rely"}, "activation is 'rely'; expected 'relu', "),
        ({"group_size": 0}, "MixtureOfExperts.group_size is 0; expected a whole number"),
        ({"router_mode": "papre"}, "mode is 'papre'; expected 'paper' or 'lingvo'"),
        ({"num_experts": 1}, "moe.router: 2 experts per token"),
        ({"hidden_dim": 0}, "MixtureOfExperts.hidden_dim is 0; expected a whole number"),
    )
    def test_rejects_invalid_options(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            make_params(**values).instantiate(path="moe")

    @parameterized.product(router=[Top2Router, ExpertChoiceRouter], name=["gather", "einsum"])
    def test_dropped_tokens_pass_no_gradient_however_large(self, name, router):
        """A norm of a dropped token's zero row has a gradient that overflows float16."""
        params = make_params(dispatch=dispatch_params(name), experts_activation="gelu")
        params.router = router.params().set(capacity_factor=0.5)
        layer = params.instantiate(path="moe")
        theta, x_BLM = layer.init(1), tf.constant(X, tf.float16)
        gradients = {}
        with context.scope(training=True, seed=tf.constant([1, 0])):
            for dropped in (0.0, np.inf):
                with tf.GradientTape() as tape:
                    tape.watch([x_BLM, *theta.flatten()])
                    y_BLM = layer.fprop(theta, x_BLM, tf.constant(MASK))
                is_dropped_BLM = (y_BLM.numpy() == 0).all(-1, keepdims=True)
                self.assertGreater(is_dropped_BLM.sum(), 3)
                d_y_BLM = tf.cast(tf.where(is_dropped_BLM, dropped, tf.ones(X.shape)), tf.float16)
                weights = [x_BLM, theta.experts.w_in, theta.experts.w_out, theta.router.w_gate]
                gradients[dropped] = tape.gradient(y_BLM, weights, output_gradients=d_y_BLM)
        for zero, infinite in zip(*gradients.values(), strict=True):
            self.assertAllEqual(zero, infinite)


class WarningsTest(testing.TestCase, parameterized.TestCase):
    """Tests warnings of groups and experts that do not divide evenly over the devices."""

    def setUp(self):
        super().setUp()
        self.warnings = []
        warning = mock.patch.object(groups._log, "warning", self.warnings.append)
        self.enter_context(warning)

    @parameterized.parameters((8, True), (3, False))
    def test_warns_if_groups_do_not_divide_over_devices(self, group_size, warned):
        layer = make_params(group_size=group_size).instantiate(path="moe")
        with use_partitioning(Partitioning.make("data=4", "expert")):
            tf.function(lambda x: layer.fprop(layer.init(1), x, MASK), autograph=False)(X)
        self.assertEqual(bool(self.warnings), warned)
        if warned:
            self.assertStartsWith(
                self.warnings[0], "moe: 3 token groups do not divide evenly over 4 devices"
            )

    @parameterized.parameters(
        ("data=8", "expert", "data=2,fsdp=4"),
        ("data=4,model=2", "expert_tensor", "data=2,fsdp=2,model=2"),
        ("data=4,fsdp=3", "expert_fsdp", "data=2,fsdp=6"),
        ("fsdp=3,data=4", "expert_fsdp", "fsdp=6,data=2"),
        ("data=2", "expert", ""),
        ("model=8", "tensor", ""),
    )
    def test_warns_of_experts_that_do_not_divide_over_devices(self, mesh, strategy, advised):
        with use_partitioning(Partitioning.make(mesh, strategy)):
            groups.warn_of_experts(2, "moe")
        parts = 8 if mesh == "data=8" else 4
        expected = (
            f"moe: 2 experts do not divide evenly over {parts} devices along data: "
            f"{1 - 2 / parts:.0%} of the experts' time is padding. On `mesh={advised}` they do."
        )
        self.assertEqual(self.warnings, [expected] if advised else [])
        with use_partitioning(Partitioning.make(advised or mesh, strategy)):
            groups.warn_of_experts(2, "moe")
        self.assertLen(self.warnings, int(bool(advised)))

    def test_the_mesh_that_is_advised_has_as_many_devices_whatever_the_experts_axis(self):
        with use_partitioning(Partitioning.make("fsdp=8", "E->fsdp")):
            groups.warn_of_experts(2, "moe")
        self.assertEndsWith(self.warnings[0], "On `mesh=fsdp=2,data=4` they do.")


if __name__ == "__main__":
    testing.main()
