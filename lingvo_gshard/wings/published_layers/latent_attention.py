"""LatentAttention: keys and values of all heads come from one latent vector of each token."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import (
    NestedMap,
    Params,
    TokenShape,
    UserError,
    face,
    initializers,
    layer_method,
    tf,
)
from lingvo_gshard.layers import (
    Attention,
    AttentionKernel,
    AttentionMask,
    RMSNorm,
    RotaryScaling,
    add_bias,
    heads_first,
    product,
    products,
    rotary,
)
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.wings.facts.flops import flops, visible_pairs
from lingvo_gshard.wings.inference.layers import cache_shapes, cached, decoding_weights, extend
from lingvo_gshard.wings.inference.layers.attention import mix_slots
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible
from lingvo_gshard.wings.inference.stored_weights import store
from lingvo_gshard.wings.published_layers import rotary_pairs, warm_queries

LOCAL_LETTERS = {
    "q": "rank of queries",
    "r": "rank of keys and values",
    "d": "both ranks and the rotated key",
}


# Letter of each product with the input that is computed as a part of one.
_DOWN = {"query_down": "q", "latent": "r", "rotary_key": "D"}


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, sections 2.1.2 and 2.1.3).

    A token has a latent vector of `key_value_rank` numbers and one rotated key of `rotary_dim`
    numbers, which all heads share. Each head expands the latent vector to a key and a value. A
    query has a part that meets the expanded key and a part that meets the rotated one.

    While decoding, the cache holds the latent vector and the rotated key only. Queries are brought
    to the latent space instead of keys to the space of the heads (section 2.1.2).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("is_causal", False, "Whether a position attends to no later one.")
        p.define("window", 0, "Largest distance between a query and a key; 0: no limit.", minimum=0)
        p.define(
            "query_rank",
            0,
            "Size of the latent vector that queries are computed from; 0: queries are a product "
            "with the input.",
            minimum=0,
        )
        p.define("key_value_rank", 0, "Size of the latent vector in the cache.", minimum=1)
        p.define("plain_dim", 0, "Size of each head's query and key without rotation.", minimum=1)
        p.define("rotary_dim", 0, "Size of the rotated queries and of the rotated key.", minimum=2)
        p.define("rotates", True, "Whether these rotate; if not, layers know no positions.")
        p.define("value_dim", 0, "Size of each head's value.", minimum=1)
        p.define("use_bias", False, "Whether the products with the input have a bias.")
        p.define("latent_norm", RMSNorm.params(), "Params of the norms of latent vectors.")
        rotary.define_rotation(p)
        rotary_pairs.define(p)
        warm_queries.define(p)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.rotary_dim % 2:
            raise UserError(f"{path}.rotary_dim: {p.rotary_dim}; an even number was expected")
        self.scaling: RotaryScaling = p.rotary_scaling.instantiate(path=f"{path}.rotary_scaling")
        self._create_weights()
        self._create_common(p.plain_dim + p.rotary_dim)

    def _create_weights(self) -> None:
        p = self.p
        sizes = {"M": p.model_dim, "N": p.num_heads, "q": p.query_rank, "r": p.key_value_rank}
        from_input = initializers.fan_in(p.model_dim)
        query_sizes = {**sizes, "D": p.plain_dim + p.rotary_dim}
        if p.query_rank:
            self.create_variable("w_query_down", "Mq", sizes, from_input, inputs="M")
            self.create_child("query_norm", p.latent_norm.copy().set(model_dim=p.query_rank))
            fan_in = initializers.fan_in(p.query_rank)
            self.create_variable("w_query", "qND", query_sizes, fan_in, inputs="q")
        else:
            self.create_variable("w_query", "MND", query_sizes, from_input, inputs="M")
        self.create_variable("w_latent", "Mr", sizes, from_input, inputs="M")
        rotary_sizes = {**sizes, "D": p.rotary_dim}
        self.create_variable("w_rotary_key", "MD", rotary_sizes, from_input, inputs="M")
        self.create_child("latent_norm", p.latent_norm.copy().set(model_dim=p.key_value_rank))
        expand = initializers.fan_in(p.key_value_rank)
        self.create_variable("w_key", "rND", {**sizes, "D": p.plain_dim}, expand, inputs="r")
        value_sizes = {**sizes, "D": p.value_dim}
        self.create_variable("w_value", "rND", value_sizes, expand, inputs="r")
        inner = initializers.fan_in(p.num_heads * p.value_dim)
        self.create_variable("w_out", "NDM", value_sizes, inner, inputs="ND")
        if p.use_bias:
            for name in self.down_products:
                zeros = initializers.constant(0.0)
                self.create_variable(f"b_{name}", _DOWN[name], rotary_sizes, zeros)

    @property
    def down_products(self) -> dict[str, int]:
        """Names of the products with the input that are computed as one, with their sizes."""
        p = self.p
        query = {"query_down": p.query_rank} if p.query_rank else {}
        return {**query, "latent": p.key_value_rank, "rotary_key": p.rotary_dim}

    def mask(self, segments_BL: tf.Tensor | None) -> AttentionMask:
        """Returns the mask of packed rows, as `SelfAttention.mask` does."""
        return self._mask_of_rows(segments_BL)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask: AttentionMask) -> tf.Tensor:
        """Returns [B,L,M]: each position attends to the positions that the mask allows.

        Args:
          mask: `self.mask` of the segments of x. Rotary positions begin at 0 in each segment.
        """
        positions = rotary.positions_of_rows(mask.segments_BL, x_BLM.shape[1], self.scaling)
        query_BLND, latent_BLr, rotated_BLD, low_BLq = self.project(theta, x_BLM, positions)
        kernel, mask = self._restrict(theta, x_BLM, low_BLq, positions, mask)
        expanded = self.expand(theta, latent_BLr, rotated_BLD)
        keys_BNKD, values_BNKD = (heads_first(x, kernel.keys_layout) for x in expanded)
        return self._attend(theta, kernel, query_BLND, keys_BNKD, values_BNKD, mask)

    def _restrict(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        low_BLq: tf.Tensor,
        positions: rotary.TextPositions,
        mask: AttentionMask,
    ) -> tuple[AttentionKernel, AttentionMask]:
        """Returns the kernel, and the mask of what each token attends to.

        Queries are computed from `low_BLq`.
        """
        del theta, x_BLM, low_BLq, positions
        return self.kernel, mask

    def index_keys(
        self, theta: NestedMap, x_BLM: tf.Tensor, positions: rotary.TextPositions
    ) -> dict[str, tf.Tensor]:
        """Returns what else the cache has of new tokens, by name: nothing."""
        del theta, x_BLM, positions
        return {}

    @layer_method
    def project(
        self, theta: NestedMap, x_BLM: tf.Tensor, positions: rotary.TextPositions
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns queries [B,L,N,D], latent vectors [B,L,r], rotated keys [B,L,D] and a last one.

        The last one is the latent vector [B,L,q] of queries, or the input if they have none. Latent
        vectors are normalized.
        """
        p = self.p
        w_Md = theta.get("w_down")
        w_Md = self.join_down(theta, "w") if w_Md is None else w_Md

        def split(down_BLd: tf.Tensor) -> list[tf.Tensor]:
            if p.use_bias:
                down_BLd = add_bias(down_BLd, self.join_down(theta, "b"))
            return tf.split(down_BLd, list(self.down_products.values()), -1)

        names = self.down_products
        equations = {f"w_{name}": f"BLM,M{_DOWN[name]}->BL{_DOWN[name]}" for name in names}
        *query_BLq, latent_BLr, key_BLD = products.joined_product(
            self, theta, equations, "BLM,Md->BLd", x_BLM, w_Md, split
        )
        low_BLq = x_BLM
        if p.query_rank:
            low_BLq = self.query_norm.fprop(theta.query_norm, query_BLq[0])
            query_BLND = product(self, theta, "w_query", "BLq,qND->BLND", low_BLq)
        else:
            query_BLND = product(self, theta, "w_query", "BLM,MND->BLND", x_BLM)
        plain_BLND, rotated_BLND = self.split_query(query_BLND)
        rotated_BLND = self._rotate(rotated_BLND, positions)
        query_BLND = tf.concat([plain_BLND, rotated_BLND], -1)
        query_BLND = annotate(warm_queries.warm(query_BLND, positions, p), "BLND")
        rotated_BLD = annotate(self._rotate(key_BLD[:, :, None], positions)[:, :, 0], "BLD")
        latent_BLr = self.latent_norm.fprop(theta.latent_norm, latent_BLr)
        return query_BLND, latent_BLr, rotated_BLD, low_BLq

    @layer_method
    def expand(
        self, theta: NestedMap, latent_BLr: tf.Tensor, rotated_BLD: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the keys and the values [B,L,N,D] of all heads; their D may differ."""
        p = self.p
        w_rND = tf.concat([theta.w_key, theta.w_value], -1)
        equation = "BLr,rND->BLND"
        plain_BLND, values_BLND = products.joined_product(
            self,
            theta,
            dict.fromkeys(("w_key", "w_value"), equation),
            equation,
            latent_BLr,
            w_rND,
            lambda both_BLND: tf.split(both_BLND, [p.plain_dim, p.value_dim], -1),
        )
        shape = [*plain_BLND.shape[:-1], p.rotary_dim]
        rotated_BLND = annotate(tf.broadcast_to(rotated_BLD[:, :, None], shape), "BLND")
        keys_BLND = annotate(tf.concat([plain_BLND, rotated_BLND], -1), "BLND")
        return keys_BLND, annotate(values_BLND, "BLND")

    def split_query(self, query_BLND: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the plain and the rotated part of queries."""
        plain_BLND, rotated_BLND = tf.split(query_BLND, [self.p.plain_dim, self.p.rotary_dim], -1)
        return plain_BLND, rotated_BLND

    def _rotate(self, x_BLND: tf.Tensor, positions: rotary.TextPositions) -> tf.Tensor:
        if not self.p.rotates:
            return x_BLND
        return rotary_pairs.rotate(x_BLND, positions, 1.0, self.p, self.scaling)

    def join_down(self, theta: NestedMap, kind: str) -> tf.Tensor:
        """Returns the weights, or the biases, of the products with the input as one."""
        return tf.concat([theta[f"{kind}_{name}"] for name in self.down_products], -1)


@flops.register(LatentAttention)
def latent_attention_flops(layer: LatentAttention, shape: TokenShape) -> int:
    """Returns the operations of the projections, of q k and of the weighted values."""
    p = layer.p
    query_dim = p.plain_dim + p.rotary_dim
    weights = p.model_dim * (p.query_rank + p.key_value_rank + p.rotary_dim)
    weights += (p.query_rank or p.model_dim) * p.num_heads * query_dim
    weights += p.key_value_rank * p.num_heads * (p.plain_dim + p.value_dim)
    weights += p.num_heads * p.value_dim * p.model_dim
    pairs = shape.rows * visible_pairs(layer, shape)
    return 2 * shape.tokens * weights + 2 * pairs * p.num_heads * (query_dim + p.value_dim)


@decoding_weights.register(LatentAttention)
def _(layer: LatentAttention, theta: NestedMap) -> NestedMap:
    """Joins the products with the input beforehand."""
    joined = [f"w_{name}" for name in layer.down_products]
    weights = NestedMap({name: w for name, w in theta.items() if name not in joined})
    weights.w_down = store(annotate(layer.join_down(theta, "w"), "Md", "weights"), "Md", "M")
    first = "q" if layer.p.query_rank else "M"
    weights.w_query = store(theta.w_query, f"{first}ND", first)
    weights.w_out = store(theta.w_out, "NDM", "ND")
    return weights


@extend.register(LatentAttention)
def _(
    layer: LatentAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Caches `key`, [B,1,K,D] of latent vectors and rotated keys."""
    positions = rotary.positions_so_far(view.positions_BL, layer.scaling)
    query_BLND, latent_BLr, rotated_BLD, low_BLq = layer.project(theta, x_BLM, positions)
    new = NestedMap(key=tf.concat([latent_BLr, rotated_BLD], -1)[:, None])
    new.update(layer.index_keys(theta, x_BLM, positions))
    written = None if cache is None else cached.write(cache, new, view)
    filled = NestedMap({n: [x] for n, x in new.items()}) if written is None else written
    visible = restrict_slots(
        layer, theta, x_BLM, low_BLq, positions, visible, filled.get("index", [])
    )
    if written is None:
        keys_BNKD, values_BNKD = map(heads_first, layer.expand(theta, latent_BLr, rotated_BLD))
        slots = NestedMap(key=[keys_BNKD], value=[values_BNKD])
        mixed_BLND, _ = mix_slots(layer, theta, query_BLND, slots, visible)
        return layer.output(theta, mixed_BLND), filled
    plain_BLND, rotated_BLND = layer.split_query(query_BLND)
    latent_BLNr = einsum("BLND,rND->BLNr", plain_BLND, tf.cast(theta.w_key, x_BLM.dtype))
    query_BLND = annotate(tf.concat([latent_BLNr, rotated_BLND], -1), "BLND")
    # A value is the first part of a key. A copy of it would take longer than to mix the rest.
    slots = NestedMap(key=written.key, value=written.key)
    mixed_BLND, _ = mix_slots(layer, theta, query_BLND, slots, visible)
    mixed_BLNr = mixed_BLND[..., : layer.p.key_value_rank]
    values_BLND = einsum("BLNr,rND->BLND", mixed_BLNr, tf.cast(theta.w_value, x_BLM.dtype))
    return layer.output(theta, values_BLND), written


@cache_shapes.register(LatentAttention)
def latent_shapes(layer: LatentAttention, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of `key`."""
    return {"key": (rows, 1, slots, layer.p.key_value_rank + layer.p.rotary_dim)}


@face
def restrict_slots(
    layer: LatentAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    low_BLq: tf.Tensor,
    positions: rotary.TextPositions,
    visible: Visible,
    slots: Sequence[tf.Tensor],
) -> Visible:
    """Returns the slots that each new token attends to.

    Args:
      low_BLq: what the tokens' queries are computed from.
      visible: the slots that the tokens see.
      slots: blocks of what `index_keys` returned for the token of each slot.
    """
    del layer, theta, x_BLM, low_BLq, positions, slots
    return visible
