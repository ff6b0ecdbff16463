# tests: layers/moe/routers/router.py, testing/passes.py
"""Tests that one file adds a router, which a RouterTest of two lines holds to conformance."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core import NestedMap, Params, TokenShape, context, layer_method
from lingvo_gshard.layers import (
    Choice,
    EinsumDispatch,
    MixtureOfExperts,
    Router,
    TokenCapacity,
    TokenChoiceRouting,
)
from lingvo_gshard.layers.moe.routers import selection
from lingvo_gshard.testing import passes
from lingvo_gshard.testing.passes import E, H, M
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.gin.binding import apply_gin


class NearestRouter(Router):
    """Sends each token to the expert whose index is nearest to the token's mean activation."""

    capacity = TokenCapacity()

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("spread", 0.5, "Distance between the targets of neighboring experts.")
        return p

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        """Returns 1."""
        return 1

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        """Returns the routing of a batch."""
        targets_E = self.p.spread * tf.range(self.p.num_experts, dtype=tf.float32)
        mean_GS1 = tf.reduce_mean(tf.cast(x_GSM, tf.float32), -1, keepdims=True)
        gates_GSE = tf.nn.softmax(-tf.square(mean_GS1 - targets_E))
        expert_GS, one_hot_GSE = selection.top_1(gates_GSE)
        gate_GS = selection.value_at(gates_GSE, one_hot_GSE)
        return self.capacity.route([Choice(expert_GS, gate_GS, mask_GS, mask_GS)])


class NearestRouterTest(testing.RouterTest):
    PARAMS = NearestRouter.params()
    STRATEGIES = (("expert_tensor", "data=4,model=2"),)


def mixture(**values: object) -> Params:
    params = MixtureOfExperts.params().set(num_experts=E, group_size=5, **values)
    router = NearestRouter.params().set(evaluation_capacity_factor=float(E))
    return params.set(model_dim=M, hidden_dim=H, router=router)


@pytest.mark.parametrize("dispatch", [None, EinsumDispatch.params()])
def test_a_training_step_changes_the_experts(dispatch):
    layer = mixture(**({"dispatch": dispatch} if dispatch else {})).instantiate(path="moe")
    theta, inputs = layer.init(1), passes.make_inputs()
    with tf.GradientTape() as tape, context.scope(training=True, seed=tf.constant([1, 0])):
        tape.watch(theta.flatten())
        loss = tf.reduce_sum(layer.fprop(theta, tf.constant(inputs.x), inputs.target_segments) ** 2)
    gradients = tape.gradient(loss, theta.flatten())
    assert any(np.any(gradient) for gradient in gradients)


def test_gin_selects_the_router():
    params = Params()
    params.define("moe", MixtureOfExperts.params(), "Params of the mixture.")
    name = f"{NearestRouter.__module__}.{NearestRouter.__name__}"
    bindings = [f"moe.router = @{name}", "moe.router.spread = 0.25"]
    router = apply_gin(params, [], bindings).moe.router
    assert router.cls is NearestRouter and router.spread == 0.25


def test_default_methods_of_the_base_class_suffice():
    """Dropless dispatch, causal decoders and FLOP counts use methods of the base class."""
    params = mixture().router.set(model_dim=2, num_experts=2)
    router = params.set(is_causal=True).instantiate(path="router")
    with pytest.raises(ValueError, match="router.evaluation_capacity_factor=4 .* dropless"):
        params.copy().set(is_dropless=True).instantiate(path="router")
    assert flops(router, TokenShape(rows=3, length=5)) == 0
    assert active_parameters(mixture().instantiate(path="moe")) == 2 * M * H
