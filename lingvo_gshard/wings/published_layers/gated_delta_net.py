"""GatedDeltaNet: a layer in place of self-attention whose memory of a text has a constant size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from lingvo_gshard.core import BIAS, NestedMap, Params, TokenShape, initializers, known_sizes, tf
from lingvo_gshard.layers import RMSNorm, joined_product, product
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import decoding_weights
from lingvo_gshard.wings.inference.stored_weights import store
from lingvo_gshard.wings.published_layers import delta_rule
from lingvo_gshard.wings.published_layers.recurrence import Recurrence

LOCAL_LETTERS = {
    "r": "values of each key head",
    "d": "size of a value",
    "f": "all that is computed from the input for a key head",
    "t": "taps of the convolution, or the tokens that it reads",
}

# Added to the squared length of queries and keys, as in the authors' implementation
# (https://github.com/fla-org/flash-linear-attention).
_EPSILON = 1e-6
# The products with the input, in the order of `f`, with the letters of each result after "BL".
FROM_INPUT = {
    "query": "ND",
    "key": "ND",
    "value": "Nrd",
    "gate": "Nrd",
    "strength": "Nr",
    "decay": "Nr",
}
CONVOLVED = {name: FROM_INPUT[name] for name in ("query", "key", "value")}


class GatedDeltaNet(Recurrence):
    """The gated delta net of arXiv 2412.06464, section 3.4, as Qwen3-Next has it.

    Queries, keys and values are products with the input. They pass a causal convolution over the
    last tokens, one for each channel, and SiLU. The gated delta rule (delta_rule.py) mixes them.
    Its output is normalized, and multiplied with SiLU of another product with the input.

    `num_heads` counts the heads of keys. Each has `values_per_head` values with a state, a decay
    and a strength of their own. Strategies split N, so that a device has the values of its keys.

    Attributes:
      from_input: name of each product of the heads with the input -> its letters after "BL".
      decays, rates: letters of the decays after "BL", and of their rates.
    """

    from_input: ClassVar[Mapping[str, str]] = FROM_INPUT
    decays: ClassVar[str] = "Nr"
    rates: ClassVar[str] = "Nr"
    convolved = CONVOLVED
    state_letters = "NrDd"
    rule = delta_rule

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("num_heads", 0, "Size of N: heads of queries and keys.", minimum=1)
        p.define("values_per_head", 1, "Size of r: values of each key head.", minimum=1)
        p.define("head_dim", 0, "Size of D: of a query and a key.", minimum=1)
        p.define("value_dim", 0, "Size of d: of a value; 0 for head_dim.", minimum=0)
        p.define("output_norm", RMSNorm.params(), "Params of the norm of the values read.")
        return p

    @classmethod
    def vectorization_obstacle(cls, params: Params) -> str:
        """Returns the option that prevents vectorization; see `Layer`."""
        del params
        return f"self_attention={cls.__name__}, whose chunks are a loop; choose execution=@Repeat"

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.value_dim = self.p.value_dim or self.p.head_dim
        self._create_weights()

    def _create_weights(self) -> None:
        p, sizes = self.p, self.sizes
        fan_in = initializers.fan_in(p.model_dim)
        for name, letters in self.from_input.items():
            self.create_variable(f"w_{name}", f"M{letters}", sizes, fan_in, inputs="M")
        self.create_taps()
        # Rates from 1/16 to 16, so that values forget at different speeds.
        rates = initializers.Initializer("uniform", math.log(16.0))
        self.create_variable("log_rate", self.rates, sizes, rates, role=BIAS)
        one = initializers.constant(1.0)
        self.create_variable("b_decay", self.decays, sizes, one, role=BIAS)
        self.create_child("output_norm", p.output_norm.copy().set(model_dim=self.value_dim))
        inner = initializers.fan_in(p.num_heads * p.values_per_head * self.value_dim)
        self.create_variable("w_out", "NrdM", sizes, inner, inputs="Nrd")

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter."""
        p = self.p
        return {
            "M": p.model_dim,
            "N": p.num_heads,
            "r": p.values_per_head,
            "D": p.head_dim,
            "d": self.value_dim,
            "t": p.convolution_width,
        }

    @property
    def features(self) -> dict[str, int]:
        """Number of features of a key head in each product with the input."""
        items = self.from_input.items()
        return {name: math.prod(self.sizes_of(letters[1:])) for name, letters in items}

    def project(self, theta: NestedMap, x_BLM: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the products with the input, by name."""
        w_MNf = theta.get("w_input")
        if w_MNf is None:
            w_MNf = self.joined_weights(theta)

        def split(joined_BLNf: tf.Tensor) -> list[tf.Tensor]:
            parts = tf.split(joined_BLNf, [*self.features.values()], -1)
            pairs = zip(parts, self.from_input.values(), strict=True)
            return [self._with_letters(part, f"BL{letters}") for part, letters in pairs]

        equations = {f"w_{name}": f"BLM,M{x}->BL{x}" for name, x in self.from_input.items()}
        parts = joined_product(self, theta, equations, "BLM,MNf->BLNf", x_BLM, w_MNf, split)
        return dict(zip(self.from_input, parts, strict=True))

    def inputs(self, theta: NestedMap, parts: Mapping[str, tf.Tensor]) -> Any:
        """Returns what tokens write into the states, and read from them."""
        strength_BLNr, decay = (tf.cast(parts[name], tf.float32) for name in ("strength", "decay"))
        rate = tf.exp(tf.cast(theta.log_rate, tf.float32))
        if self.rates != self.decays:
            rate = rate[..., None]
        decay = tf.nn.softplus(decay + tf.cast(theta.b_decay, tf.float32))
        return self.rule.Inputs(
            _unit(parts["query"]) / math.sqrt(self.p.head_dim),
            _unit(parts["key"]),
            parts["value"],
            annotate(-rate * decay, f"BL{self.decays}"),
            annotate(tf.nn.sigmoid(strength_BLNr), "BLNr"),
        )

    def activate_gate(self, gate: tf.Tensor) -> tf.Tensor:
        """Returns the factor of the outputs for a float32 gate."""
        return tf.nn.silu(gate)

    def output(
        self, theta: NestedMap, read: tf.Tensor, parts: Mapping[str, tf.Tensor]
    ) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for what was read from the states."""
        gate_BLNrd = parts["gate"]
        mixed_BLNrd = tf.cast(read, gate_BLNrd.dtype)
        mixed_BLNrd = self.output_norm.fprop(theta.output_norm, mixed_BLNrd)
        factor_BLNrd = self.activate_gate(tf.cast(gate_BLNrd, tf.float32))
        gated_BLNrd = tf.cast(mixed_BLNrd, tf.float32) * factor_BLNrd
        gated_BLNrd = annotate(tf.cast(gated_BLNrd, gate_BLNrd.dtype), "BLNrd")
        return product(self, theta, "w_out", "BLNrd,NrdM->BLM", gated_BLNrd)

    def _with_letters(self, x_BLNf: tf.Tensor, layout: str) -> tf.Tensor:
        """Returns features of key heads with a dimension for each letter of the layout."""
        shape = [*known_sizes(x_BLNf.shape)[:2], *self.sizes_of(layout[2:])]
        return annotate(tf.reshape(x_BLNf, shape), layout)

    def joined_weights(self, theta: NestedMap) -> tf.Tensor:
        """Returns the weights of all products with the input as one."""
        p = self.p
        shape = [p.model_dim, p.num_heads, -1]
        joined = tf.concat([tf.reshape(theta[f"w_{name}"], shape) for name in self.from_input], -1)
        return annotate(joined, "MNf", "weights")


def _unit(x_BLND: tf.Tensor) -> tf.Tensor:
    squares_BLN1 = tf.reduce_sum(tf.square(x_BLND), -1, keepdims=True)
    return annotate(x_BLND * tf.math.rsqrt(squares_BLN1 + _EPSILON), "BLND")


@flops.register(GatedDeltaNet)
def delta_net_flops(layer: GatedDeltaNet, shape: TokenShape) -> int:
    """Counts the products, the convolution and the delta rule."""
    p, features = layer.p, layer.features
    products = p.model_dim * (sum(features.values()) + math.prod(layer.sizes_of("rd")))
    taps = p.convolution_width * sum(features[name] for name in CONVOLVED)
    size = min(p.chunk_size, shape.length)
    # The products of keys with keys and queries, and for each value: the solution of the system,
    # the values that a query sees, and three products with the state.
    both = 2 * size * p.head_dim
    own = size * (p.head_dim + 2 * layer.value_dim) + 4 * p.head_dim * layer.value_dim
    rule = both + p.values_per_head * own
    return 2 * shape.tokens * p.num_heads * (products + taps + rule)


@decoding_weights.register(GatedDeltaNet)
def joined_for_decoding(layer: GatedDeltaNet, theta: NestedMap) -> NestedMap:
    """Joins the products with the input beforehand."""
    joined = {f"w_{name}" for name in layer.from_input}
    weights = NestedMap({name: w for name, w in theta.items() if name not in joined})
    weights.w_input = store(layer.joined_weights(theta), "MNf", "M")
    weights.w_out = store(theta.w_out, "NrdM", "Nrd")
    return weights
