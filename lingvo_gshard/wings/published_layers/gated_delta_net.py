"""GatedDeltaNet: a layer in place of self-attention whose memory of a text has a constant size."""

from __future__ import annotations

import math

from lingvo_gshard.core import (
    BIAS,
    SCALE,
    Layer,
    NestedMap,
    Params,
    TokenShape,
    UserError,
    initializers,
    known_sizes,
    layer_method,
    tf,
)
from lingvo_gshard.layers import (
    AttentionKernel,
    AttentionMask,
    DenseKernel,
    Reach,
    RMSNorm,
    product,
    rotary,
)
from lingvo_gshard.layers.products import joined_product
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import (
    cache_shapes,
    decoding_weights,
    extend,
    state_shapes,
)
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible, check_one_text
from lingvo_gshard.wings.inference.stored_weights import store
from lingvo_gshard.wings.published_layers import delta_rule

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
CONVOLVED = ("query", "key", "value")


class GatedDeltaNet(Layer):
    """The gated delta net of arXiv 2412.06464, section 3.4, as Qwen3-Next has it.

    Queries, keys and values are products with the input. They pass a causal convolution over the
    last tokens, one for each channel, and SiLU. The gated delta rule (delta_rule.py) mixes them.
    Its output is normalized, and multiplied with SiLU of another product with the input.

    `num_heads` counts the heads of keys. Each has `values_per_head` values with a state, a decay
    and a strength of their own. Strategies split N, so that a device has the values of its keys.

    While decoding, the cache of a row has the states and the last inputs of the convolution.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("num_heads", 0, "Size of N: heads of queries and keys.", minimum=1)
        p.define("values_per_head", 1, "Size of r: values of each key head.", minimum=1)
        p.define("head_dim", 0, "Size of D: of a query and a key.", minimum=1)
        p.define("value_dim", 0, "Size of d: of a value; 0 for head_dim.", minimum=0)
        p.define("convolution_width", 4, "Tokens that the convolution reads.", minimum=1)
        p.define("chunk_size", 64, "Positions that are computed at once.", minimum=1)
        p.define("output_norm", RMSNorm.params(), "Params of the norm of the values read.")
        p.define("is_causal", False, "Must be True: states hold only earlier tokens.")
        p.define(
            "kernel",
            DenseKernel.params(),
            "Params of the kernel of the stack's attentions, which share masks with this layer.",
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if not p.is_causal:
            raise UserError(f"{path}.is_causal: False; GatedDeltaNet needs a causal stack")
        self.kernel: AttentionKernel = p.kernel.instantiate(path=f"{path}.kernel")
        self.value_dim = p.value_dim or p.head_dim
        self._create_weights()

    def _create_weights(self) -> None:
        p, sizes = self.p, self._sizes
        fan_in = initializers.fan_in(p.model_dim)
        for name, letters in FROM_INPUT.items():
            self.create_variable(f"w_{name}", f"M{letters}", sizes, fan_in, inputs="M")
        # Uniform with the variance 1 / (3 width), as convolutions of PyTorch have it.
        taps = initializers.glorot_uniform(9 * p.convolution_width, 9 * p.convolution_width)
        for name in CONVOLVED:
            layout = f"t{FROM_INPUT[name]}"
            self.create_variable(f"w_{name}_taps", layout, sizes, taps, role=SCALE)
        # Rates from 1/16 to 16, so that values forget at different speeds.
        rates = initializers.Initializer("uniform", math.log(16.0))
        self.create_variable("log_rate", "Nr", sizes, rates, role=BIAS)
        self.create_variable("b_decay", "Nr", sizes, initializers.constant(1.0), role=BIAS)
        self.create_child("output_norm", p.output_norm.copy().set(model_dim=self.value_dim))
        inner = initializers.fan_in(p.num_heads * p.values_per_head * self.value_dim)
        self.create_variable("w_out", "NrdM", sizes, inner, inputs="Nrd")

    @property
    def _sizes(self) -> dict[str, int]:
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
        sizes = self._sizes
        return {
            name: math.prod(sizes[letter] for letter in letters[1:])
            for name, letters in FROM_INPUT.items()
        }

    @property
    def reach(self) -> Reach:
        """The part of a text that a position reads: all before it."""
        return Reach()

    def mask(self, segments_BL: tf.Tensor | None) -> AttentionMask:
        """Returns the mask of packed rows, as `SelfAttention.mask` does."""
        mask = AttentionMask(segments_BL, is_causal=True)
        return mask if segments_BL is None else self.kernel.prepare(mask)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask: AttentionMask) -> tf.Tensor:
        """Returns [B,L,M]: each position reads what earlier ones of its segment have written.

        Args:
          mask: `self.mask` of the segments of x.
        """
        segments_BL = mask.segments_BL
        if segments_BL is None:
            segments_BL = tf.ones(known_sizes(x_BLM.shape)[:2], tf.int32)
        return self.observe(self.run_rows(theta, x_BLM, segments_BL)[0])

    @layer_method
    def run_rows(
        self, theta: NestedMap, x_BLM: tf.Tensor, segments_BL: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the output [B,L,M], the states and the last inputs of the convolution."""
        width, length = self.p.convolution_width, known_sizes(x_BLM.shape)[1]
        convolved_BLNf, others = self._project(theta, x_BLM)
        taps_tNf = self._taps(theta)
        sum_BLNf = tf.zeros_like(convolved_BLNf, tf.float32)
        for back in range(min(width, length)):
            shifted_BLNf = _shifted(convolved_BLNf, segments_BL, back)
            sum_BLNf += tf.cast(shifted_BLNf, tf.float32) * taps_tNf[width - 1 - back]
        inputs = self._inputs(theta, sum_BLNf, others)
        is_first_BL = rotary.is_first_in_segment(segments_BL)
        mixed_BLNrd, state = delta_rule.run_rows(inputs, is_first_BL, self.p.chunk_size)
        # The last tokens of the last segment.
        is_last_BL = tf.equal(segments_BL, segments_BL[:, -1:])
        kept = min(width - 1, length)
        last_BLNf = tf.where(is_last_BL[:, :, None, None], convolved_BLNf, 0)[:, length - kept :]
        last_BLNf = tf.pad(last_BLNf, [[0, 0], [width - 1 - kept, 0], [0, 0], [0, 0]])
        recent_BNtf = tf.cast(tf.transpose(last_BLNf, (0, 2, 1, 3)), tf.float32)
        y_BLM = self._output(theta, mixed_BLNrd, others["gate"])
        return y_BLM, state, annotate(recent_BNtf, "BNtf")

    @layer_method
    def run_step(
        self, theta: NestedMap, x_BLM: tf.Tensor, state_BNrDd: tf.Tensor, recent_BNtf: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the same as `run_rows`, for one token of each row."""
        convolved_BLNf, others = self._project(theta, x_BLM)
        new_BNtf = tf.cast(tf.transpose(convolved_BLNf, (0, 2, 1, 3)), tf.float32)
        read_BNtf = annotate(tf.concat([recent_BNtf, new_BNtf], 2), "BNtf")
        taps_Ntf = tf.transpose(self._taps(theta), (1, 0, 2))
        sum_BNf = tf.reduce_sum(read_BNtf * taps_Ntf, 2)
        inputs = self._inputs(theta, sum_BNf[:, None], others)
        inputs = delta_rule.Inputs(**{name: x[:, 0] for name, x in vars(inputs).items()})
        mixed_BNrd, state_BNrDd = delta_rule.run_step(inputs, state_BNrDd)
        y_BLM = self._output(theta, mixed_BNrd[:, None], others["gate"])
        return y_BLM, state_BNrDd, read_BNtf[:, :, 1:]

    @layer_method
    def _project(
        self, theta: NestedMap, x_BLM: tf.Tensor
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Returns the inputs [B,L,N,f] of the convolution, and the other products by name."""
        w_MNf = theta.get("w_input")
        if w_MNf is None:
            w_MNf = self.joined_weights(theta)

        def split(joined_BLNf: tf.Tensor) -> list[tf.Tensor]:
            parts = tf.split(joined_BLNf, [*self.features.values()], -1)
            pairs = zip(parts, FROM_INPUT.values(), strict=True)
            return [self._with_letters(part, f"BL{letters}") for part, letters in pairs]

        equations = {f"w_{name}": f"BLM,M{x}->BL{x}" for name, x in FROM_INPUT.items()}
        parts = joined_product(self, theta, equations, "BLM,MNf->BLNf", x_BLM, w_MNf, split)
        found = dict(zip(FROM_INPUT, parts, strict=True))
        batch, length, _ = known_sizes(x_BLM.shape)
        shape = [batch, length, self.p.num_heads, -1]
        convolved = [tf.reshape(found.pop(name), shape) for name in CONVOLVED]
        return annotate(tf.concat(convolved, -1), "BLNf"), found

    def _inputs(
        self, theta: NestedMap, sum_BLNf: tf.Tensor, others: dict[str, tf.Tensor]
    ) -> delta_rule.Inputs:
        """Returns what the delta rule reads.

        Args:
          sum_BLNf: float32 sums of the convolution.
          others: the products with the input that are not convolved.
        """
        sizes = [self.features[name] for name in CONVOLVED]
        query_BLND, key_BLND, value_BLNf = tf.split(tf.nn.silu(sum_BLNf), sizes, -1)
        strength_BLNr, decay_BLNr = (tf.cast(others[n], tf.float32) for n in ("strength", "decay"))
        rate_Nr = tf.exp(tf.cast(theta.log_rate, tf.float32))
        decay_BLNr = tf.nn.softplus(decay_BLNr + tf.cast(theta.b_decay, tf.float32))
        return delta_rule.Inputs(
            _unit(query_BLND) / math.sqrt(self.p.head_dim),
            _unit(key_BLND),
            self._with_letters(value_BLNf, "BLNrd"),
            annotate(-rate_Nr * decay_BLNr, "BLNr"),
            annotate(tf.nn.sigmoid(strength_BLNr), "BLNr"),
        )

    @layer_method
    def _output(self, theta: NestedMap, mixed_BLNrd: tf.Tensor, gate_BLNrd: tf.Tensor) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for what was read from the states."""
        mixed_BLNrd = tf.cast(mixed_BLNrd, gate_BLNrd.dtype)
        mixed_BLNrd = self.output_norm.fprop(theta.output_norm, mixed_BLNrd)
        gated_BLNrd = tf.cast(mixed_BLNrd, tf.float32) * tf.nn.silu(tf.cast(gate_BLNrd, tf.float32))
        gated_BLNrd = annotate(tf.cast(gated_BLNrd, gate_BLNrd.dtype), "BLNrd")
        return product(self, theta, "w_out", "BLNrd,NrdM->BLM", gated_BLNrd)

    def _with_letters(self, x_BLNf: tf.Tensor, layout: str) -> tf.Tensor:
        """Returns features of key heads with a dimension for each letter of the layout."""
        sizes = self._sizes
        shape = [*known_sizes(x_BLNf.shape)[:2], *(sizes[letter] for letter in layout[2:])]
        return annotate(tf.reshape(x_BLNf, shape), layout)

    def joined_weights(self, theta: NestedMap) -> tf.Tensor:
        """Returns the weights of all products with the input as one."""
        p = self.p
        shape = [p.model_dim, p.num_heads, -1]
        joined = tf.concat([tf.reshape(theta[f"w_{name}"], shape) for name in FROM_INPUT], -1)
        return annotate(joined, "MNf", "weights")

    def _taps(self, theta: NestedMap) -> tf.Tensor:
        """Returns the float32 weights [t,N,f] of the convolution."""
        shape = [self.p.convolution_width, self.p.num_heads, -1]
        taps = [tf.reshape(theta[f"w_{name}_taps"], shape) for name in CONVOLVED]
        return tf.cast(tf.concat(taps, -1), tf.float32)


def _shifted(x_BLNf: tf.Tensor, segments_BL: tf.Tensor, back: int) -> tf.Tensor:
    """Returns x shifted by `back` positions, with zeros where a segment begins."""
    if not back:
        return x_BLNf
    before_BLNf = tf.pad(x_BLNf[:, :-back], [[0, 0], [back, 0], [0, 0], [0, 0]])
    before_BL = tf.pad(segments_BL[:, :-back], [[0, 0], [back, 0]], constant_values=-1)
    is_own_BL11 = tf.equal(before_BL, segments_BL)[:, :, None, None]
    return annotate(tf.where(is_own_BL11, before_BLNf, 0), "BLNf")


def _unit(x_BLND: tf.Tensor) -> tf.Tensor:
    squares_BLN1 = tf.reduce_sum(tf.square(x_BLND), -1, keepdims=True)
    return annotate(x_BLND * tf.math.rsqrt(squares_BLN1 + _EPSILON), "BLND")


@flops.register(GatedDeltaNet)
def _(layer: GatedDeltaNet, shape: TokenShape) -> int:
    """Counts the products, the convolution and the delta rule."""
    p, features = layer.p, layer.features
    products = p.model_dim * (sum(features.values()) + features["value"])
    taps = p.convolution_width * sum(features[name] for name in CONVOLVED)
    size = min(p.chunk_size, shape.length)
    # The products of keys with keys and queries, and for each value: the solution of the system,
    # the values that a query sees, and three products with the state.
    both = 2 * size * p.head_dim
    own = size * (p.head_dim + 2 * layer.value_dim) + 4 * p.head_dim * layer.value_dim
    rule = both + p.values_per_head * own
    return 2 * shape.tokens * p.num_heads * (products + taps + rule)


@decoding_weights.register(GatedDeltaNet)
def _(layer: GatedDeltaNet, theta: NestedMap) -> NestedMap:
    """Joins the products with the input beforehand."""
    joined = {f"w_{name}" for name in FROM_INPUT}
    weights = NestedMap({name: w for name, w in theta.items() if name not in joined})
    weights.w_input = store(layer.joined_weights(theta), "MNf", "M")
    weights.w_out = store(theta.w_out, "NrdM", "Nrd")
    return weights


@extend.register(GatedDeltaNet)
def _(
    layer: GatedDeltaNet,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Caches `state` and `recent`, the inputs of the convolution that the next token also reads.

    Without a cache, the new tokens are rows that end with their texts.
    """
    del visible
    if cache is None:
        assert view.mask is not None and view.mask.segments_BL is not None
        y_BLM, state_BNrDd, recent_BNtf = layer.run_rows(theta, x_BLM, view.mask.segments_BL)
        return y_BLM, NestedMap(state=state_BNrDd, recent=recent_BNtf)
    batch, length, _ = known_sizes(x_BLM.shape)
    check_one_text(layer, length)
    shapes = state_shapes(layer, batch, length)
    # A text that begins finds what the last text of its row has left.
    is_old_B111 = tf.cast(view.positions_BL > 0, tf.float32)[:, :, None, None]
    state_BNrDd = tf.reshape(cache.state, shapes["state"]) * is_old_B111[..., None]
    recent_BNtf = tf.reshape(cache.recent, shapes["recent"]) * is_old_B111
    y_BLM, state_BNrDd, recent_BNtf = layer.run_step(theta, x_BLM, state_BNrDd, recent_BNtf)
    return y_BLM, NestedMap(
        state=tf.reshape(state_BNrDd, cache.state.shape),
        recent=tf.reshape(recent_BNtf, cache.recent.shape),
    )


@cache_shapes.register(GatedDeltaNet)
def _(layer: GatedDeltaNet, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Returns no shapes: states have no slots."""
    del layer, rows, slots
    return {}


@state_shapes.register(GatedDeltaNet)
def _(layer: GatedDeltaNet, rows: int, positions: int) -> dict[str, tuple[int, ...]]:
    del positions
    p = layer.p
    convolved = sum(layer.features[name] for name in CONVOLVED)
    return {
        "state": (rows, p.num_heads, p.values_per_head, p.head_dim, layer.value_dim),
        "recent": (rows, p.num_heads, p.convolution_width - 1, convolved),
    }
