"""KimiDeltaAttention: a gated delta net whose decays differ by channel."""

from __future__ import annotations

import math

from lingvo_gshard.core import NestedMap, Params, TokenShape, initializers, tf
from lingvo_gshard.layers import product
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import decoding_weights
from lingvo_gshard.wings.inference.stored_weights import store
from lingvo_gshard.wings.published_layers import channel_delta_rule, gated_delta_net

LOCAL_LETTERS = {
    "k": "rank of decays and gates",
    "r": "values of each key head",
    "d": "size of a value",
}

# The products of low rank, with the letters of each result after "BL".
_LOW_RANK = {"decay": "ND", "gate": "Nrd"}


class KimiDeltaAttention(gated_delta_net.GatedDeltaNet):
    """Kimi Delta Attention (arXiv 2510.26692, section 4), as Kimi Linear has it.

    Each channel of a key has a decay of its own, and each head a rate (channel_delta_rule.py).
    Decays and gates are products with vectors of `gate_rank` numbers, which are products with the
    input. Sigmoids of gates multiply the outputs.
    """

    from_input = {**gated_delta_net.CONVOLVED, "strength": "Nr"}
    decays = "ND"
    rates = "N"
    rule = channel_delta_rule

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("gate_rank", 0, "Size of k: rank of decays and gates; 0: head_dim.", minimum=0)
        return p

    def _create_weights(self) -> None:
        super()._create_weights()
        sizes, p = self.sizes, self.p
        for name, letters in _LOW_RANK.items():
            fan_in = initializers.fan_in(p.model_dim)
            self.create_variable(f"w_{name}_down", "Mk", sizes, fan_in, inputs="M")
            fan_in = initializers.fan_in(sizes["k"])
            self.create_variable(f"w_{name}", f"k{letters}", sizes, fan_in, inputs="k")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter."""
        return {**super().sizes, "k": self.p.gate_rank or self.p.head_dim}

    def project(self, theta: NestedMap, x_BLM: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the products with the input, by name."""
        parts = super().project(theta, x_BLM)
        for name, letters in _LOW_RANK.items():
            down_BLk = product(self, theta, f"w_{name}_down", "BLM,Mk->BLk", x_BLM)
            equation = f"BLk,k{letters}->BL{letters}"
            parts[name] = product(self, theta, f"w_{name}", equation, down_BLk)
        return parts

    def activate_gate(self, gate: tf.Tensor) -> tf.Tensor:
        """Returns the factor of the outputs for a float32 gate."""
        return tf.nn.sigmoid(gate)


@flops.register(KimiDeltaAttention)
def _(layer: KimiDeltaAttention, shape: TokenShape) -> int:
    """Counts what a gated delta net has, and the products of low rank."""
    sizes = sum(math.prod(layer.sizes_of(letters)) for letters in _LOW_RANK.values())
    low_rank = layer.sizes["k"] * (len(_LOW_RANK) * layer.p.model_dim + sizes)
    return gated_delta_net.delta_net_flops(layer, shape) + 2 * shape.tokens * low_rank


@decoding_weights.register(KimiDeltaAttention)
def _(layer: KimiDeltaAttention, theta: NestedMap) -> NestedMap:
    """Stores what a gated delta net has, and the weights of low rank."""
    weights = gated_delta_net.joined_for_decoding(layer, theta)
    for name, letters in _LOW_RANK.items():
        weights[f"w_{name}_down"] = store(theta[f"w_{name}_down"], "Mk", "M")
        weights[f"w_{name}"] = store(theta[f"w_{name}"], f"k{letters}", "k")
    return weights
