"""Tests that one file and one conformance case add a layer.

The layer below is not used in the package. Its Case runs the conformance tests of all layers:
runners, gradients, padding, weights and partitioned runs.
"""

from __future__ import annotations

import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import einsum
from tests.layers import conformance, test_conformance, test_conformance_partitioned

LOCAL_LETTERS = {"r": "rank of the adapter"}


class Adapter(Layer):
    """Computes x + x w_down w_up, with a low-rank bottleneck."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("rank", 2, "Size of the bottleneck.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        sizes = {"M": self.p.model_dim, "r": self.p.rank}
        self.create_variable("w_down", "Mr", sizes, initializers.fan_in(self.p.model_dim))
        self.create_variable("w_up", "rM", sizes, initializers.fan_in(self.p.rank))

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M]."""
        h_BLr = einsum("BLM,Mr->BLr", x_BLM, theta.w_down)
        return self.observe(x_BLM + einsum("BLr,rM->BLM", h_BLr, theta.w_up))

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of both products."""
        return 2 * 2 * shape.tokens * self.p.model_dim * self.p.rank


CASE = conformance.Case(
    "Adapter",
    Adapter.params().set(model_dim=conformance.M),
    lambda layer, theta, inputs: layer.fprop(theta, inputs.x),
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


def test_operations_and_weights_are_counted():
    layer = CASE.build()
    assert layer.flops(TokenShape(rows=3, length=5)) == 2 * 2 * 15 * conformance.M * 2
    assert layer.active_parameters() == 2 * conformance.M * 2
