"""The stack of Gemma 4 E2B and E4B: layers use keys of earlier layers, and have own inputs.

https://ai.google.dev/gemma/docs/core/model_card_4. Layers run one by one. A loop over layers would
carry all keys and values from iteration to iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import (
    Layer,
    NestedMap,
    Params,
    TokenShape,
    UserError,
    context,
    initializers,
    layer_method,
    remat_policy,
    tf,
)
from lingvo_gshard.layers import (
    FeedForward,
    RMSNorm,
    Sequential,
    TokenEmbedding,
    TransformerStack,
    product,
    rotary,
    token_context,
)
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.facts.flops import flops
from lingvo_gshard.wings.inference.layers import cache_shapes, decoding_weights, extend
from lingvo_gshard.wings.inference.layers.attention import extend_row, mix_slots, slot_shapes
from lingvo_gshard.wings.inference.layers.transformer import around_layers
from lingvo_gshard.wings.published_layers import warm_queries
from lingvo_gshard.wings.published_layers.gemma4 import ScaledLayer
from lingvo_gshard.wings.published_layers.published_attention import (
    PublishedAttention,
    published_flops,
)

LOCAL_LETTERS = {"i": "layers with inputs of their own"}

OWN, LENT, BORROWED = KEYS = ("own", "lent", "borrowed")


def keys_of_layers(windows: Sequence[int], borrowing: int, where: str) -> list[str]:
    """Returns the `keys` of layers with these windows; UserError if one has no lender."""
    first = max(len(windows) - borrowing, 0)
    if not set(windows) <= set(windows[:first]):
        raise UserError(
            f"{where} is {borrowing} of {len(windows)} layers; fewer were expected, so that a "
            "layer of each type of attention stands before them"
        )
    lends = [borrowing > 0 and w not in windows[i + 1 : first] for i, w in enumerate(windows)]
    return [LENT if each else OWN for each in lends[:first]] + [BORROWED] * borrowing


@dataclasses.dataclass(frozen=True)
class Carried:
    """The inputs [B,L,H] of layers by place, and keys and values, or slots, to borrow by reach."""

    inputs: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    keys: dict[Any, Any] = dataclasses.field(default_factory=dict)


class LayerInputs(Layer):
    """Makes the inputs of all layers: (norm(x w / sqrt(M)) + sqrt(H) embedding) / sqrt(2)."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        for name in ("model_dim", "hidden_dim", "num_layers", "vocabulary_size"):
            p.define(name, 0, "Size of M, H or V, or number of layers.", minimum=1)
        p.define("norm", RMSNorm.params(), "Params of the norm of the products.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        sizes = {"M": p.model_dim, "i": p.num_layers, "H": p.hidden_dim}
        self.create_variable("w", "MiH", sizes, initializers.normal(1.0), inputs="M")
        self.create_child("norm", p.norm.copy().set(model_dim=p.hidden_dim))
        table = TokenEmbedding.params().set(vocabulary_size=p.vocabulary_size)
        table.set(model_dim=p.num_layers * p.hidden_dim, scale=p.hidden_dim**0.5)
        self.create_child("embedding", table)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor) -> list[tf.Tensor]:
        """Returns the inputs [B,L,H] of all layers for the input of the stack."""
        ids_BL = token_context.current().ids
        assert ids_BL is not None, f"{self.path} needs the ids of tokens"
        h_BLiH = product(self, theta, "w", "BLM,MiH->BLiH", x_BLM) * self.p.model_dim**-0.5
        rows_BLM = self.embedding.fprop(theta.embedding, ids_BL)
        rows_BLiH = annotate(tf.reshape(rows_BLM, h_BLiH.shape), "BLiH")
        h_BLiH = self.norm.fprop(theta.norm, h_BLiH) + tf.cast(rows_BLiH, h_BLiH.dtype)
        return [annotate(h_BLH, "BLH") for h_BLH in tf.unstack(h_BLiH * 2**-0.5, axis=2)]


class InputGate(FeedForward):
    """(activation(x w_in) * input) w_out, with an input of the layer's own."""

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, input_BLH: tf.Tensor) -> tf.Tensor:
        """Returns the output [B,L,M] for x and the layer's own input."""
        h_BLH = self._project_in(theta, "in", x_BLM)
        h_BLH = self.activation(h_BLH, tf.cast(input_BLH, h_BLH.dtype))
        return product(self, theta, "w_out", "BLH,HM->BLM", h_BLH)


class SharedKeysAttention(PublishedAttention):
    """A `PublishedAttention` that lends its keys and values to later layers, or borrows them."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("keys", OWN, "Whether keys are own, also lent, or borrowed.", choices=KEYS)
        return p

    def _create_weights(self) -> None:
        super()._create_weights()
        names = "w_key", "w_value", "b_key", "b_value", "key_norm", "value_norm"
        for name in names if self.p.keys == BORROWED else ():
            self._variables.pop(name, None)
            self._children.pop(name, None)

    def joined_products(self) -> list[tuple[str, ...]]:
        if self.p.keys == OWN:
            return super().joined_products()
        names = [name for names in super().joined_products() for name in names]
        first = tuple(name for name in names if name in ("w_query", "w_gate"))
        rest = tuple(name for name in names if name not in first)
        return [first] if self.p.keys == BORROWED else [first, rest]

    @layer_method
    def project_row(self, theta: NestedMap, x_BLM: tf.Tensor, positions: Any) -> tuple:
        """Returns queries, the keys and values that are given, if they are, and the gate."""
        keys = context.extension(Carried).keys.get(self.reach)
        if not keys or self.p.keys == OWN:
            return super().project_row(theta, x_BLM, positions)
        query_BLND, *gate = self._project(theta, x_BLM, *self.joined_products()[0])
        query_BLND = self._placed("query", theta, query_BLND, positions)
        query_BLND = warm_queries.warm(query_BLND, positions, self.p)
        return query_BLND, *keys, gate[0] if gate else None


class SharedKeysLayer(ScaledLayer):
    """A layer that may have an input of its own, which enters after the feed-forward layer."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("input_dim", 0, "Size of the layer's own input; 0: none.", minimum=0)
        p.define("place", 0, "Number of the layer. Set by the stack.", minimum=0)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        if self.p.input_dim:
            gate = InputGate.params().set(activation="gelu_tanh", use_bias=False)
            self._create_sublayer("input_gate", gate.set(hidden_dim=self.p.input_dim))
            self._children.pop("input_gate_norm", None)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, masks: Any, *given: Any) -> tf.Tensor:
        """Returns [B,L,M], given own inputs, and keys and values to use, both as tuples."""
        if not given:
            raise UserError(f"{self.path}: a SharedKeysStack was expected to run this layer")
        inputs = dict(zip((self.p.place,), given[0], strict=False))
        keys = {self.self_attention.reach: given[1]}
        with context.override_extension(Carried, inputs=inputs, keys=keys):
            return super().fprop(theta, x_BLM, masks)

    def scaled(self, theta: NestedMap, x: tf.Tensor) -> tf.Tensor:
        if self.p.input_dim:
            own_BLH = context.extension(Carried).inputs[self.p.place]
            h = self.input_gate.fprop(theta.input_gate, x, own_BLH)
            x = self.add("input_gate", theta, x, h)
        return super().scaled(theta, x)


class SharedKeysStack(TransformerStack):
    """A stack whose last layers borrow keys and values of the last layer with the same window."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("borrowing_last", 0, "Number of last layers that borrow keys.", minimum=0)
        p.define("widens_borrowers", False, "Whether H is twice as large in layers that borrow.")
        p.define("layer_inputs", LayerInputs.params(), "Params of the layers' own inputs.")
        return p.set(layer=SharedKeysLayer.params())

    def __init__(self, params: Params, path: str = ""):
        run = params.execution
        if run.cls is not Sequential or run.interleaved != 1 or params.is_decoder:
            raise UserError(
                f"{path}.execution: {run.cls.__name__} with interleaved={run.interleaved} and "
                f"{path}.is_decoder={params.is_decoder}; Sequential, 1 and False were expected"
            )
        super().__init__(params, path)
        p = self.p
        if p.layer.input_dim:
            made = p.layer_inputs.copy().set(model_dim=p.model_dim, num_layers=p.num_layers)
            made.set(hidden_dim=p.layer.input_dim, norm=p.layer.norm.copy())
            self.create_child("layer_inputs", made)

    def layer_params(self, index: int) -> Params:
        """Returns the Params of layer `index`, with all that the stack sets."""
        p, layer = self.p, super().layer_params(index)
        pattern = p.attention_pattern or (p.layer.self_attention,)
        windows = [pattern[i % len(pattern)].window for i in range(p.num_layers)]
        keys = keys_of_layers(windows, p.borrowing_last, f"{self.path}.borrowing_last")[index]
        attention = SharedKeysAttention.params().set(**dict(layer.self_attention.items()))
        layer.set(place=index, self_attention=attention.set(keys=keys))
        if keys == BORROWED and p.widens_borrowers:
            made = layer.feed_forward
            name = "shared_hidden_dim" if "shared_hidden_dim" in made else "hidden_dim"
            made.set(**{name: 2 * made.get(name)})
        return layer

    @layer_method
    def fprop(
        self, theta: NestedMap, x_BLM: tf.Tensor, segments_BL: tf.Tensor, memory: None = None
    ) -> tf.Tensor:
        """Returns the normalized output [B,L,M]; see the base class."""
        masks, inputs, keys = self._masks(theta, segments_BL), self.inputs(theta, x_BLM), {}
        x_BLM = self._drop_tokens(theta, self.begin(theta, x_BLM), segments_BL)
        x_BLM = self.input_dropout.fprop(theta.input_dropout, x_BLM)
        for place, (layer, weights) in enumerate(self.unrolled(theta)):
            attention, its = layer.self_attention, weights.self_attention
            if attention.p.keys == LENT:
                h_BLM = layer.enter("self_attention", weights, x_BLM)
                positions = attention.positions(h_BLM, segments_BL)
                keys[attention.reach] = attention.project_row(its, h_BLM, positions)[1:3]
            used = () if attention.p.keys == OWN else keys[attention.reach]
            given = layer, weights, x_BLM, masks, tuple(inputs[place : place + 1]), used
            is_kept = self.p.execution.rematerialize == remat_policy.NONE
            run = self.layers.run_rematerialized
            x_BLM = layer.fprop(*given[1:]) if is_kept else run(*given)
        return self.observe(self.finish(theta, x_BLM))

    def inputs(self, theta: NestedMap, x_BLM: tf.Tensor) -> list[tf.Tensor]:
        """Returns the inputs [B,L,H] of all layers; [] if they have none."""
        has_inputs = self.p.layer.input_dim
        return self.layer_inputs.fprop(theta.layer_inputs, x_BLM) if has_inputs else []


@around_layers.register(SharedKeysStack)
def _(stack: SharedKeysStack, theta: NestedMap, x_BLM: tf.Tensor) -> Any:
    inputs = dict(enumerate(stack.inputs(theta, x_BLM)))
    return context.override_extension(Carried, inputs=inputs, keys={})


@decoding_weights.register(LayerInputs)
def _(layer: LayerInputs, theta: NestedMap) -> NestedMap:
    return NestedMap(theta, embedding=decoding_weights(layer.embedding, theta.embedding))


@extend.register(SharedKeysAttention)
def _(
    layer: SharedKeysAttention, theta: NestedMap, x: tf.Tensor, view: Any, visible: Any, cache: Any
) -> tuple[tf.Tensor, NestedMap]:
    """Borrowed slots stay in the cache of the layer that lends them."""
    if layer.p.keys != BORROWED:
        y, slots = extend_row(layer, theta, x, view, visible, cache)
        if layer.p.keys == LENT:
            context.extension(Carried).keys[layer.reach] = slots, None
        return y, slots
    positions = rotary.positions_so_far(view.positions_BL, layer.scaling)
    query_BLND, slots, _, gate_BLND = layer.project_row(theta, x, positions)
    bias = layer.own_bias(theta)
    bias = visible.learned_bias if bias is None else bias.at(view.distances_LK)
    mixed_BLND, _ = mix_slots(layer, theta, query_BLND, slots, visible, bias)
    return layer.output(theta, mixed_BLND, gate_BLND), NestedMap()


@cache_shapes.register(SharedKeysAttention)
def _(layer: SharedKeysAttention, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    return {} if layer.p.keys == BORROWED else slot_shapes(layer, rows, slots)


@flops.register(SharedKeysAttention)
def _(layer: SharedKeysAttention, shape: TokenShape) -> int:
    sizes = layer.head_dim + layer.value_dim * layer.p.has_value_weight
    less = 2 * shape.tokens * layer.p.model_dim * layer.key_value_heads * sizes
    return published_flops(layer, shape) - less * (layer.p.keys == BORROWED)


@flops.register(LayerInputs)
def _(layer: LayerInputs, shape: TokenShape) -> int:
    return 2 * shape.tokens * layer.p.model_dim * layer.p.num_layers * layer.p.hidden_dim
