"""Mamba2: a layer in place of self-attention whose states forget at a rate that tokens choose."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lingvo_gshard.core import BIAS, SCALE, NestedMap, Params, TokenShape, initializers, tf
from lingvo_gshard.layers import product
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import decoding_weights
from lingvo_gshard.wings.inference.stored_weights import store
from lingvo_gshard.wings.published_layers import state_space
from lingvo_gshard.wings.published_layers.recurrence import Recurrence

LOCAL_LETTERS = {
    "g": "groups of heads, which share keys and queries",
    "d": "size of a value",
    "t": "taps of a convolution",
}

# The products with the input, with the letters of each result after "BL".
FROM_INPUT = {"gate": "gNd", "value": "gNd", "key": "gD", "query": "gD", "step": "gN"}
CONVOLVED = {name: FROM_INPUT[name] for name in ("value", "key", "query")}


class Mamba2(Recurrence):
    """The layer of Mamba-2, arXiv 2405.21060, section 7.1.

    Values, keys and queries, which the paper calls x, B and C, are products with the input. They
    pass a causal convolution over the last tokens, one for each channel, and SiLU. A further
    product gives the length of a step for each head, which decides how much the head forgets. The
    values that are read of the states (state_space.py) are multiplied with SiLU of a gate, and
    normalized in each group of heads.

    Strategies split N, so that a device has some heads of each group.
    """

    convolved = CONVOLVED
    state_letters = "NgDd"
    rule = state_space

    @classmethod
    def params(cls) -> Params:
        p = super().params().set(chunk_size=128)
        p.define("num_groups", 1, "Groups of heads, which share keys and queries.", minimum=1)
        p.define("num_heads", 0, "Size of N: heads of each group.", minimum=1)
        p.define("head_dim", 128, "Size of D: of a key, and of a value's state.", minimum=1)
        p.define("value_dim", 64, "Size of d: of a value.", minimum=1)
        p.define("least_step", 0.0, "The smallest step; shorter ones become this one.", minimum=0)
        p.define("use_convolution_bias", True, "Whether convolutions add a bias.")
        p.define("epsilon", 1e-5, "Added to the mean of squares of the norm.", above=0)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p, sizes = self.p, self.sizes
        for name, letters in FROM_INPUT.items():
            fan_in = initializers.fan_in(p.model_dim)
            self.create_variable(f"w_{name}", f"M{letters}", sizes, fan_in, inputs="M")
        zero, one = initializers.constant(0.0), initializers.constant(1.0)
        self.create_taps()
        if p.use_convolution_bias:
            for name, letters in CONVOLVED.items():
                self.create_variable(f"b_{name}", letters, sizes, zero, role=BIAS)
        # Rates from 1/16 to 16, and steps of 0.01: the middle of the paper's 0.001 to 0.1.
        rates = initializers.Initializer("uniform", math.log(16.0))
        self.create_variable("log_rate", "gN", sizes, rates, role=BIAS)
        step = initializers.constant(math.log(math.expm1(0.01)))
        self.create_variable("b_step", "gN", sizes, step, role=BIAS)
        self.create_variable("skip", "gN", sizes, one, role=SCALE)
        self.create_variable("scale", "gNd", sizes, one, role=SCALE)
        inner = initializers.fan_in(p.num_groups * p.num_heads * p.value_dim)
        self.create_variable("w_out", "gNdM", sizes, inner, inputs="gNd")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter."""
        p = self.p
        return {
            "M": p.model_dim,
            "g": p.num_groups,
            "N": p.num_heads,
            "D": p.head_dim,
            "d": p.value_dim,
            "t": p.convolution_width,
        }

    def project(self, theta: NestedMap, x_BLM: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the products with the input, by name."""
        return {
            name: product(self, theta, f"w_{name}", f"BLM,M{letters}->BL{letters}", x_BLM)
            for name, letters in FROM_INPUT.items()
        }

    def activate(self, theta: NestedMap, name: str, total: tf.Tensor) -> tf.Tensor:
        """Returns SiLU of the float32 sums of a convolution, after their bias."""
        if self.p.use_convolution_bias:
            total += tf.cast(theta[f"b_{name}"], tf.float32)
        return super().activate(theta, name, total)

    def inputs(self, theta: NestedMap, parts: Mapping[str, tf.Tensor]) -> state_space.Inputs:
        """Returns what tokens write into the states, and read from them."""
        weights = {name: tf.cast(theta[name], tf.float32) for name in ("b_step", "log_rate")}
        step_BLgN = tf.nn.softplus(tf.cast(parts["step"], tf.float32) + weights["b_step"])
        step_BLgN = annotate(tf.maximum(step_BLgN, self.p.least_step), "BLgN")
        return state_space.Inputs(
            parts["query"],
            parts["key"],
            parts["value"] * step_BLgN[..., None],
            annotate(-tf.exp(weights["log_rate"]) * step_BLgN, "BLgN"),
        )

    def output(
        self, theta: NestedMap, read: tf.Tensor, parts: Mapping[str, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for what was read from the states."""
        gate_BLgNd = parts["gate"]
        skip_gN1 = tf.cast(theta.skip, tf.float32)[..., None]
        y_BLgNd = read + parts["value"] * skip_gN1
        y_BLgNd = annotate(y_BLgNd * tf.nn.silu(tf.cast(gate_BLgNd, tf.float32)), "BLgNd")
        squares_BLg11 = tf.reduce_mean(tf.square(y_BLgNd), (-2, -1), keepdims=True)
        y_BLgNd *= tf.math.rsqrt(squares_BLg11 + self.p.epsilon) * tf.cast(theta.scale, tf.float32)
        y_BLgNd = annotate(tf.cast(y_BLgNd, gate_BLgNd.dtype), "BLgNd")
        return product(self, theta, "w_out", "BLgNd,gNdM->BLM", y_BLgNd)


@flops.register(Mamba2)
def _(layer: Mamba2, shape: TokenShape) -> int:
    """Counts the products, the convolutions and the states."""
    p, size = layer.p, min(layer.p.chunk_size, shape.length)
    features = {name: math.prod(layer.sizes_of(letters)) for name, letters in FROM_INPUT.items()}
    products = p.model_dim * (sum(features.values()) + features["value"])
    taps = p.convolution_width * sum(features[name] for name in CONVOLVED)
    # Keys with queries; and for each head: what a chunk reads of itself, and a state that is
    # written and read.
    heads = p.num_groups * p.num_heads
    states = p.num_groups * size * p.head_dim + heads * p.value_dim * (size + 2 * p.head_dim)
    return 2 * shape.tokens * (products + taps + states)


@decoding_weights.register(Mamba2)
def _(layer: Mamba2, theta: NestedMap) -> NestedMap:
    """Stores the weights of products."""
    del layer
    weights = NestedMap(theta)
    for name, letters in FROM_INPUT.items():
        weights[f"w_{name}"] = store(theta[f"w_{name}"], f"M{letters}", "M")
    weights.w_out = store(theta.w_out, "gNdM", "gNd")
    return weights
