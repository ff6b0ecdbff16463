"""LatentExperts: a mixture of experts whose experts compute smaller vectors than the layer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import NestedMap, Params, TokenShape, initializers, layer_method, tf
from lingvo_gshard.layers import MixtureOfExperts, product
from lingvo_gshard.wings.facts.flops import flops, mixture_flops

LOCAL_LETTERS = {"r": "size of the vectors that experts compute"}


class LatentExperts(MixtureOfExperts):
    """Experts that share a product from M to r before them, and one back to M after them.

    The method is LatentMoE, arXiv 2601.18089. The router and the shared expert read the tokens
    themselves. Devices exchange vectors of r.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("latent_dim", 0, "Size of the vectors that experts compute.", minimum=1)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        sizes = {"M": p.model_dim, "r": p.latent_dim}
        for name, layout in (("down", "Mr"), ("up", "rM")):
            init = initializers.fan_in(sizes[layout[0]])
            self.create_variable(f"w_{name}", layout, sizes, init, inputs=layout[0])

    def _with_sizes(self, name: str, sizes: Sequence[str]) -> Params:
        child = super()._with_sizes(name, sizes)
        return child.set(model_dim=self.p.latent_dim) if name == "experts" else child

    @layer_method
    def gated(self, theta: NestedMap, routing: Any, x_GSM: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Returns the routing, and the vectors [G,S,r] that experts compute."""
        x_GSr = product(self, theta, "w_down", "GSM,Mr->GSr", x_GSM)
        return super().gated(theta, routing, x_GSr)

    @layer_method
    def finish(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask_BL: tf.Tensor, y_BLr: tf.Tensor
    ) -> tf.Tensor:
        """Returns the layer's output, given the output y [B,L,r] of the routed experts."""
        y_BLM = product(self, theta, "w_up", "BLr,rM->BLM", y_BLr)
        return super().finish(theta, x_BLM, mask_BL, y_BLM)


@flops.register(LatentExperts)
def _(layer: LatentExperts, shape: TokenShape) -> int:
    both = 4 * shape.tokens * layer.p.model_dim * layer.p.latent_dim
    return mixture_flops(layer, shape) + both
