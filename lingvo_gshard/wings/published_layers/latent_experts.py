"""LatentExperts: routed experts that compute smaller vectors than the layer's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import NestedMap, Params, TokenShape, initializers, layer_method, tf
from lingvo_gshard.layers import MixtureOfExperts, product
from lingvo_gshard.wings.facts.flops import experts_flops, flops

LOCAL_LETTERS = {"l": "size of the vectors that routed experts compute"}


class LatentExperts(MixtureOfExperts):
    """A mixture whose tokens pass one product before all routed experts, and one after them.

    The router and the shared expert compute whole tokens (LatentMoE, arXiv 2601.18089).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("latent_dim", 0, "Size of l: of the inputs of routed experts.", minimum=1)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p, sizes = self.p, {"M": self.p.model_dim, "l": self.p.latent_dim}
        self.create_variable("w_down", "Ml", sizes, initializers.fan_in(p.model_dim), inputs="M")
        self.create_variable("w_up", "lM", sizes, initializers.fan_in(p.latent_dim), inputs="l")

    def _with_sizes(self, name: str, sizes: Sequence[str]) -> Params:
        child = super()._with_sizes(name, sizes)
        return child.set(model_dim=self.p.latent_dim) if name == "experts" else child

    @layer_method
    def gated(self, theta: NestedMap, routing: Any, x_GSM: tf.Tensor) -> tuple[Any, tf.Tensor]:
        x_GSl = product(self, theta, "w_down", "GSM,Ml->GSl", x_GSM)
        return super().gated(theta, routing, x_GSl)

    @layer_method
    def finish(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, y_BLM: tf.Tensor
    ) -> tf.Tensor:
        y_BLM = product(self, theta, "w_up", "BLl,lM->BLM", y_BLM)
        return super().finish(theta, x_BLM, mask_BL, y_BLM)


@flops.register(LatentExperts)
def _(layer: LatentExperts, shape: TokenShape) -> int:
    p = layer.p
    return experts_flops(layer, shape) + 4 * shape.tokens * p.model_dim * p.latent_dim
