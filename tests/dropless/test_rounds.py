# tests: wings/dropless/rounds.py, wings/dropless/exchanges.py
"""Tests that rows over the bound are computed in further rounds, as one device computes them."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.functions.partition import partition
from tests.dropless.example_layers import (
    E,
    H,
    M,
    both_ways,
    check_equal,
    make,
    on_devices,
    weights_of,
)
from tests.layers.stacks.executions import loop, sequential

EXCHANGES = ("gathered", "fixed", "ragged")
# Tokens that are much alike, so that most of them choose the same experts.
RNG = np.random.default_rng(1)
X = (0.2 * RNG.normal(size=(8, 8, M)) + RNG.normal(size=M)).astype(np.float32)
MASK = tf.ones(X.shape[:2], tf.int32)
# Experts split over one of two axes that split the groups, and over both.
HALF = "activations: B,G->data,host | E->host"
BOTH = "activations: B,G->data,host | E->data,host"


def make_stack(execution) -> TransformerStack:
    moe = MixtureOfExperts.params().set(
        num_experts=E, group_size=4, dispatch=DroplessDispatch.params().set(bound=0.4)
    )
    moe.router.capacity_factor = 0.0
    params = TransformerStack.params().set(
        model_dim=M, hidden_dim=H, num_heads=1, num_layers=2, moe=moe, moe_every=1,
        execution=execution,
    )  # fmt: skip
    return params.instantiate(path="stack")


class RoundsTest(testing.TestCase, parameterized.TestCase):
    def check_mesh(self, mesh, strategy, over=0.1, **values):
        """Compares output and gradients on a mesh with one device, if `over` rows are left."""
        values = {"experts__use_bias": True, "experts__activation": "swiglu", **values}
        layer = make(experts=8, **values)
        theta = weights_of(layer)
        found = on_devices(layer, mesh, strategy)(theta, X)
        self.assertGreater(float(found.metrics["moe/over_bound_share"]), over)
        check_equal(found, both_ways(layer, theta, X, MASK))

    @parameterized.parameters("gathered", "fixed")
    def test_equals_one_device(self, exchange):
        self.check_mesh("data=8", "expert", dispatch__exchange=exchange)

    @parameterized.product(
        exchange=EXCHANGES,
        placed=(
            ("data=8", "expert"),
            ("data=4,model=2", "expert_tensor"),
            ("data=2,fsdp=4", "expert_fsdp"),
            ("data=4,model=2", "folded_tensor"),
            ("data=2,host=4", HALF),
        ),
    )
    @pytest.mark.slow
    def test_equals_one_device_under_other_strategies(self, exchange, placed):
        self.check_mesh(*placed, dispatch__exchange=exchange, dispatch__bound=0.7)

    @parameterized.parameters(
        ("gathered", {"chunks": 3}),
        ("fixed", {"chunks": 3}),
        ("fixed", {"hierarchical": True}),
        ("gathered", {"hierarchical": True}),
        ("fixed", {"precision": "int8"}),
    )
    @pytest.mark.slow
    def test_equals_one_device_with_options_of_the_exchange(self, exchange, options):
        options = {f"exchange__{name}": value for name, value in options.items()}
        values = {"dispatch__exchange": exchange, "dispatch__bound": 0.5, **options}
        self.check_mesh("data=2,host=4", BOTH, **values)

    @parameterized.product(execution=(loop, sequential), policy=("none", "products", "full"))
    @pytest.mark.slow
    def test_rematerialized_stacks_equal_one_device(self, execution, policy):
        stack = make_stack(execution(policy))
        theta = stack.init(1)
        found = on_devices(stack, "data=4", "expert")(theta, X)
        for name, shares in found.metrics.items():
            if name.endswith("over_bound_share"):
                self.assertGreater(float(np.min(shares)), 0.3)
        check_equal(found, both_ways(stack, theta, X, MASK))

    @pytest.mark.slow
    def test_bfloat16_rows_equal_those_of_one_device(self):
        layer = make(experts=8, dispatch__bound=0.5)
        theta = weights_of(layer)
        x = tf.cast(X, tf.bfloat16)
        found = on_devices(layer, "data=8", "expert")(theta, x)
        one = both_ways(layer, theta, tf.cast(x, tf.float32), MASK)
        assert_close(tf.cast(found.output, tf.float32), one.output, "bfloat16")
        w_in = found.gradients.theta.experts.w_in
        assert_close(w_in, one.gradients.theta.experts.w_in, "bfloat16")

    @parameterized.parameters("gathered", "fixed")
    @pytest.mark.slow
    def test_gradients_have_the_dropout_masks_of_the_outputs(self, exchange):
        """Compares the gradient with a difference of two outputs: both have the same masks."""
        layer = make(
            experts=8, experts__dropout_rate=0.5, experts__activation="silu",
            dispatch__exchange=exchange, dispatch__bound=0.5,
        )  # fmt: skip
        theta = weights_of(layer)

        def run(theta, x):
            found = both_ways(layer, theta, x, MASK, training=True)
            return found.output, found.gradients.theta.experts, found.metrics

        step = partition(run, "data=8", "expert")
        weights = np.cos(np.arange(X.size)).reshape(X.shape)
        _, gradients, metrics = step(theta, X)
        self.assertGreater(float(metrics["moe/over_bound_share"]), 0.3)
        for name in ("w_in", "w_out"):
            direction = np.random.default_rng(3).normal(size=theta.experts[name].shape)
            direction = direction.astype(np.float32)
            outputs = []
            for size in (-0.01, 0.01):
                moved = theta.transform(tf.identity)
                moved.experts[name] = theta.experts[name] + size * direction
                outputs.append(np.sum(weights * step(moved, X)[0]))
            expected = (outputs[1] - outputs[0]) / 0.02
            self.assertAllClose(np.sum(gradients[name] * direction), expected, rtol=1e-2)

    def compiled(self, **values):
        """Returns the compiled forward and backward pass of a layer."""
        layer = make(experts=8, **values)
        shapes = layer.variable_specs().transform(lambda s: tf.TensorSpec(s.shape, s.dtype))
        return on_devices(layer, "data=8", "expert").compile(shapes, tf.TensorSpec(X.shape))

    @parameterized.parameters("gathered", "fixed")
    def test_a_step_without_rows_over_the_bound_exchanges_nothing_more(self, exchange):
        """XLA would exchange before the loop what is equal in each round."""
        found = [
            self.compiled(dispatch__exchange=exchange, dispatch__bound=bound)
            for bound in (1.5, 0.0)
        ]
        rounds, without = (
            [call.kind for call in each.collectives() if call.kind != "all-reduce"]
            for each in found
        )
        self.assertEqual(sorted(rounds), sorted(without))
        (note,) = [note for note in found[0].operations().notes if "over a bound" in note]
        self.assertIn("expected_0_trips", note)

    @parameterized.parameters(
        (
            {"dispatch__over_bound": "keep"},
            r"moe.dispatch.over_bound: 'keep'. Valid: compute, drop",
        ),
        (
            {"dispatch__over_bound": "drop", "dispatch__bound": 0.0},
            "moe.dispatch.over_bound='drop' .*moe.dispatch.bound, which is 0.*expected a positive",
        ),
    )
    def test_refuses_what_drops_nothing(self, values, message):
        with self.assertRaisesRegex(ValueError, message):
            make(**values)


if __name__ == "__main__":
    testing.main()
