"""Tests that one file and one conformance case add a router.

The router below is not used in the package. It passes the tests of all layers, trains, and
can be selected by gin.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.config.gin_binding import apply_gin
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import EinsumDispatch, MixtureOfExperts
from lingvo_gshard.layers.moe.capacity import Choice
from lingvo_gshard.layers.moe.routers import selection
from lingvo_gshard.layers.moe.routers.token_choice import TokenChoiceRouter
from lingvo_gshard.layers.moe.routing import TokenChoiceRouting
from tests.layers import conformance, test_conformance, test_conformance_partitioned


class NearestRouter(TokenChoiceRouter):
    """Sends each token to the expert whose index is nearest to the token's mean activation."""

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
        choice = Choice(expert_GS, gate_GS, mask_GS, mask_GS)
        return self.route([choice], self.capacity(x_GSM.shape[1]))


def mixture(**values: object) -> Params:
    params = MixtureOfExperts.params().set(num_experts=conformance.E, group_size=5, **values)
    params.set(model_dim=conformance.M, hidden_dim=conformance.H)
    factor = float(conformance.E)
    return params.set(router=NearestRouter.params().set(evaluation_capacity_factor=factor))


CASE = conformance.Case(
    "MoE.nearest",
    mixture(),
    lambda layer, theta, inputs: layer.fprop(theta, inputs.x, inputs.target_segments),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for tests in (test_conformance, test_conformance_partitioned):
        monkeypatch.setitem(tests.BY_NAME, CASE.name, CASE)


def test_conforms_on_one_device():
    test_conformance.test_all_runners_agree(CASE.name, True, "jit")
    test_conformance.test_gradients_match_difference_quotients(CASE.name, True)
    test_conformance.test_weights_match_their_specs(CASE.name)
    test_conformance.test_params_round_trip_through_text(CASE.name)
    test_conformance.test_padding_has_no_effect(CASE.name)
    test_conformance.test_packing_does_not_change_a_sentence(CASE.name)


def test_conforms_on_eight_devices():
    test_conformance_partitioned.test_hybrid_strategy_in_training(CASE.name)


@pytest.mark.parametrize("dispatch", [None, EinsumDispatch.params()])
def test_a_training_step_changes_the_experts(dispatch):
    layer = mixture(**({"dispatch": dispatch} if dispatch else {})).instantiate(path="moe")
    theta, inputs = layer.init(1), conformance.make_inputs()
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
    router = mixture().router.set(model_dim=2, num_experts=2).instantiate(path="router")
    router.check_causal()
    with pytest.raises(ValueError, match="router.evaluation_capacity_factor=4 .* dropless"):
        router.disable_capacity()
    assert router.flops(TokenShape(rows=3, length=5)) == 0
    assert (
        mixture().instantiate(path="moe").active_parameters() == 2 * conformance.M * conformance.H
    )
