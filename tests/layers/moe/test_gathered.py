# tests: layers/moe/dispatches/gathered.py, layers/moe/dispatches/dispatch.py
"""Tests that buffers which devices fill from gathered tokens equal one device, and what is sent."""

import math

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.published_layers.routers import ExpertChoiceRouter
from tests.layers.moe.dispatch_names import dispatch_params

M, H, S = 4, 6, 8
X = np.random.default_rng(1).normal(size=(8, S, M)).astype(np.float32)


def make(dispatch="gather", experts=8, chooses=False, exchange="gathered", **options):
    params = MixtureOfExperts.params().set(
        model_dim=M,
        hidden_dim=H,
        num_experts=experts,
        group_size=S,
        dispatch=dispatch_params(dispatch).set(exchange=exchange),
    )
    if chooses:
        params.router = ExpertChoiceRouter.params()
    params.exchange.set(**options)
    return params.instantiate(path="moe")


def both_ways(layer):
    """Returns a function (weights, x) that returns the output and all gradients."""
    specs = layer.variable_specs()

    def run(theta, x):
        theta, x = annotate_weights(theta, specs), annotate(x, "BLM")
        with context.scope(training=True, seed=tf.constant([1, 2])), tf.GradientTape() as tape:
            tape.watch((theta, x))
            y = layer.fprop(theta, x, tf.ones(x.shape[:2], tf.int32))
            total = tf.reduce_sum(y * np.cos(np.arange(math.prod(y.shape))).reshape(y.shape))
        return NestedMap(y=y, gradients=tape.gradient(total, (theta, x)))

    return run


class GatheredBuffersTest(testing.TestCase, parameterized.TestCase):
    def check(self, mesh, strategy, **options):
        layer = make(**options)
        theta = layer.init(1)
        expected = both_ways(make(**{**options, "exchange": ""}))(theta, tf.constant(X))
        alone = both_ways(layer)(theta, tf.constant(X))
        found = partition(both_ways(layer), mesh, strategy)(theta, X)
        for many, one, plain in zip(*map(tf.nest.flatten, (found, alone, expected)), strict=True):
            most = 3e-6 * np.abs(plain).max()
            self.assertAllClose(one, plain, rtol=0, atol=most)
            self.assertAllClose(many, plain, rtol=0, atol=most)

    @parameterized.parameters({}, {"dispatch": "einsum", "chooses": True})
    def test_equals_one_device(self, **options):
        self.check("data=8", "expert", **options)

    @parameterized.product(
        options=(
            {},
            {"dispatch": "einsum"},
            {"chooses": True},
            {"dispatch": "einsum", "chooses": True},
            {"experts": 6},
        ),
        placed=(
            ("data=4,model=2", "expert_tensor"),
            ("data=2,fsdp=2,model=2", "expert_fsdp_tensor"),
            ("data=2,host=4", "activations: B,G->data,host | E->host"),
            ("data=4,model=2", "folded_tensor"),
        ),
    )
    @pytest.mark.slow
    def test_equals_one_device_under_other_strategies(self, options, placed):
        self.check(*placed, **options)

    @parameterized.parameters("gather", "einsum")
    def test_tokens_are_sent_in_place_of_buffers(self, dispatch):
        """Gathers tokens and gradients of sums; sends sums and gradients of tokens back."""

        def sent(layer):
            specs = layer.variable_specs().transform(lambda s: tf.TensorSpec(s.shape, s.dtype))
            step = partition(both_ways(layer), "data=8", "expert")
            calls = step.compile(specs, tf.TensorSpec(X.shape, tf.float32)).collectives()
            return [(call.kind, call.bytes) for call in calls if call.bytes >= X.nbytes // 8]

        tokens, capacity = X.nbytes, 2 * S // 8
        gathered = sent(make(dispatch))
        self.assertEqual(gathered.count(("all-gather", tokens)), 2)
        self.assertEqual(gathered.count(("all-to-all", tokens)), 2)
        buffers = 8 * capacity * M * 4
        self.assertEqual(sent(make(dispatch, exchange="")).count(("all-to-all", buffers)), 4)

    def test_rejects_what_it_cannot_honor(self):
        message = "moe.exchange.chunks=2 .*moe.dispatch.exchange is 'gathered'"
        with self.assertRaisesRegex(ValueError, message):
            make(chunks=2)
        with self.assertRaisesRegex(ValueError, "moe.dispatch.exchange: 'ragged'"):
            make(exchange="ragged")


if __name__ == "__main__":
    testing.main()
