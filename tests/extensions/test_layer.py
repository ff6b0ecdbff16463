# tests: core/layer.py, testing/layers.py
"""Tests that one file adds a layer, and that a LayerTest of two lines holds it to conformance."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core import Layer, NestedMap, Params, TokenShape, initializers, layer_method
from lingvo_gshard.sharding import einsum
from lingvo_gshard.testing.passes import M
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.facts.parameters import active_parameters

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


@flops.register(Adapter)
def adapter_flops(layer: Adapter, shape: TokenShape) -> int:
    """Returns the operations of both products."""
    return 2 * 2 * shape.tokens * layer.p.model_dim * layer.p.rank


class AdapterTest(testing.LayerTest):
    PARAMS = Adapter.params()
    STRATEGIES = (("expert_tensor", "data=4,model=2"),)

    def test_operations_and_weights_are_counted(self):
        layer = self.case.build()
        self.assertEqual(flops(layer, TokenShape(rows=3, length=5)), 2 * 2 * 15 * M * 2)
        self.assertEqual(active_parameters(layer), 2 * M * 2)


if __name__ == "__main__":
    testing.main()
