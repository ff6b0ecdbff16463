"""CompressedAttention: attention to near tokens, and to windows of tokens compressed to one key."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import (
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
    MASKED,
    Attention,
    AttentionMask,
    DenseKernel,
    RMSNorm,
    RotaryScaling,
    add_bias,
    product,
    products,
    rotary,
)
from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings.facts.flops import flops, visible_pairs
from lingvo_gshard.wings.inference.layers import cache_shapes, extend, state_shapes
from lingvo_gshard.wings.inference.layers.cached import CacheView, Visible, check_one_text
from lingvo_gshard.wings.published_layers import key_blocks, rotary_pairs
from lingvo_gshard.wings.published_layers.indexed_attention import chosen_bias
from lingvo_gshard.wings.published_layers.key_blocks import KeyBlocks
from lingvo_gshard.wings.published_layers.windows import WindowCompressor, Windows, rotate_last

LOCAL_LETTERS = {
    "q": "rank of queries",
    "r": "rank of the output of a group of heads",
    "s": "series of values of a token",
    "f": "features that a window reads of a token",
}


class CompressedAttention(Attention):
    """Attention of DeepSeek-V4 (technical report, sections 2.3.1 to 2.3.3).

    All heads share one key of each token, which is also its value. A query attends to the keys of
    tokens within `window`. With `compressed`, it also attends to one key for each complete
    window of so many tokens. With `index_heads`, an indexer of small heads chooses `index_topk` of
    these windows for each query, and all that score the same as the last one. The choice has no
    gradient, so the indexer's weights are frozen.

    The last part of a key rotates. The same part of the output is rotated back at the query, so
    that it depends on distances alone. Groups of heads have output products of low rank, whose
    results a last product joins.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("is_causal", False, "Must be True: windows of a text hold only earlier tokens.")
        p.define("window", 0, "Largest distance between a query and a token's key.", minimum=1)
        p.define("query_rank", 0, "Size of the latent vector of queries.", minimum=1)
        p.define("head_dim", 0, "Size of D of queries, and of the keys.", minimum=1)
        p.define("rotary_dim", 0, "Size of the last part of D, which rotates.", minimum=2)
        p.define("output_groups", 1, "Groups of heads, or of their parts.", minimum=1)
        p.define("output_rank", 0, "Size of the output of a group.", minimum=1)
        p.define("compressed", 0, "Tokens of a window with one key; 0: no windows.", minimum=0)
        p.define("overlaps", False, "Whether a window also reads the tokens of the one before.")
        p.define("index_heads", 0, "Heads of the indexer; 0: queries see all windows.", minimum=0)
        p.define("index_dim", 0, "Size of D of the indexer's queries and keys.", minimum=0)
        p.define("index_topk", 512, "Windows that a query attends to.", minimum=1)
        p.define("norm", RMSNorm.params(), "Params of the norms of queries and keys.")
        rotary.define_rotation(p)
        rotary_pairs.define(p)
        return p.set(use_sinks=True)

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self.scaling: RotaryScaling = p.rotary_scaling.instantiate(path=f"{path}.rotary_scaling")
        self._check()
        sizes = {"M": p.model_dim, "N": p.num_heads, "D": p.head_dim, "q": p.query_rank}
        from_input, from_rank = map(initializers.fan_in, (p.model_dim, p.query_rank))
        self.create_variable("w_query_down", "Mq", sizes, from_input, inputs="M")
        self.create_child("query_down_norm", p.norm.copy().set(model_dim=p.query_rank))
        self.create_variable("w_query", "qND", sizes, from_rank, inputs="q")
        self.create_child("query_norm", p.norm.copy().set(model_dim=p.head_dim, has_scale=False))
        self.create_variable("w_key", "MD", sizes, from_input, inputs="M")
        self.create_child("key_norm", p.norm.copy().set(model_dim=p.head_dim))
        groups, inner = p.output_groups, p.num_heads * p.head_dim // p.output_groups
        sizes = {"N": groups, "D": inner, "r": p.output_rank, "M": p.model_dim}
        self.create_variable("w_out_down", "NDr", sizes, initializers.fan_in(inner), inputs="D")
        init = initializers.fan_in(groups * p.output_rank)
        self.create_variable("w_out", "NrM", sizes, init, inputs="Nr")
        if p.compressed:
            self.create_child("compressor", self._compressor(p.head_dim))
        if p.index_heads:
            sizes = {"M": p.model_dim, "N": p.index_heads, "D": p.index_dim, "q": p.query_rank}
            self.create_variable("w_index_query", "qND", sizes, from_rank, is_frozen=True)
            self.create_variable("w_index_head", "MN", sizes, from_input, is_frozen=True)
            indexer = self._compressor(p.index_dim).set(is_frozen=True)
            self.create_child("index_compressor", indexer)
        self._create_common(p.head_dim)

    def _check(self) -> None:
        p, path = self.p, self.path
        if not p.is_causal:
            raise UserError(f"{path}.is_causal: False; True was expected")
        if p.kernel.cls is not DenseKernel:
            raise UserError(
                f"{path}.kernel: {p.kernel.cls.__name__} cannot mask single keys; DenseKernel was "
                "expected"
            )
        if p.num_heads * p.head_dim % p.output_groups:
            raise UserError(
                f"{path}.output_groups: {p.output_groups} does not divide {path}.num_heads times "
                f"{path}.head_dim, {p.num_heads * p.head_dim}"
            )
        if p.rotary_dim % 2 or p.rotary_dim > p.head_dim:
            raise UserError(
                f"{path}.rotary_dim: {p.rotary_dim}; an even number up to {path}.head_dim, "
                f"{p.head_dim}, was expected"
            )
        if self.scaling.needs_lengths:
            raise UserError(
                f"{path}.rotary_scaling: {type(self.scaling).__name__} depends on the lengths of "
                "texts, which windows do not know; another one was expected"
            )
        if p.index_heads and not (p.compressed and p.index_dim >= p.rotary_dim):
            raise UserError(
                f"{path}.index_heads: {p.index_heads} with {path}.compressed={p.compressed} and "
                f"{path}.index_dim={p.index_dim}; windows, and {path}.rotary_dim or more, were "
                "expected"
            )

    def _compressor(self, key_dim: int) -> Params:
        p = self.p
        names = ("model_dim", "rotary_dim", "overlaps", "norm", *_ROTATION)
        same = {name: p.get(name) for name in names}
        return WindowCompressor.params().set(size=p.compressed, key_dim=key_dim, **same)

    def mask(self, segments_BL: tf.Tensor | None) -> AttentionMask:
        """Returns the mask of packed rows, without a bias: each block computes its own."""
        return AttentionMask(segments_BL, is_causal=True, window=self.p.window)

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor, mask: AttentionMask) -> tf.Tensor:
        """Returns [B,L,M]: each position attends to the positions that the mask allows.

        Args:
          mask: `self.mask` of the segments of x. Rotary positions begin at 0 in each segment.
        """
        return self.observe(self.run_rows(theta, x_BLM, mask)[0])

    @layer_method
    def run_rows(
        self, theta: NestedMap, x_BLM: tf.Tensor, mask: AttentionMask
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns the output [B,L,M], and the arrays that the cache of decoding is made of."""
        p, (batch, length, _) = self.p, known_sizes(x_BLM.shape)
        segments_BL = mask.segments_BL
        segments_BL = tf.ones([batch, length], tf.int32) if segments_BL is None else segments_BL
        positions = rotary.positions_of_rows(segments_BL, length, self.scaling)
        query_BLND, key_BLD, low_BLq = self.project(theta, x_BLM, positions)
        made = NestedMap(near=key_BLD, segments=segments_BL)
        keys = [KeyBlocks.near(key_BLD, segments_BL, mask)]
        windows = None
        if 0 < p.compressed <= length:
            windows = Windows.of(positions.index_BL, segments_BL, p.compressed)
        for name, layer in self.compressors.items():
            made[f"{name}_open"] = both_BLsD = layer.project(theta[name], x_BLM)
            if windows:
                made[name] = layer.pool(theta[name], windows.split(both_BLsD), windows.start_BK)
        if windows:
            more_BLK = tf.where(windows.visible_BLK, 0.0, MASKED)
            index_BKD = made.get("index_compressor")
            more_BLK = self.choose(theta, x_BLM, low_BLq, positions, index_BKD, more_BLK)
            keys.append(KeyBlocks.of_row(made.compressor, more_BLK))
        return self.mix(theta, query_BLND, keys, positions), made

    @property
    def compressors(self) -> dict[str, WindowCompressor]:
        """The layers that make keys of windows, by their names."""
        names = ("compressor", "index_compressor")
        return {name: getattr(self, name) for name in names if name in self.children}

    @layer_method
    def mix(
        self,
        theta: NestedMap,
        query_BLND: tf.Tensor,
        keys: Sequence[KeyBlocks],
        positions: rotary.TextPositions,
    ) -> tf.Tensor:
        """Returns the output [B,L,M] of queries for keys, which are also the values."""
        query_BLND *= tf.constant(self.query_scale, query_BLND.dtype)
        softmax = self.softmax(theta, None, self.dropout.mask())
        mixed_BLND = key_blocks.attend(query_BLND, keys, softmax)
        # A value is rotated as a key. Turned back, it depends on the distance to the query alone.
        back = positions._replace(index_BL=-positions.index_BL)
        mixed_BLND = annotate(rotate_last(mixed_BLND, back, self.p, self.scaling), "BLND")
        return self.output(theta, mixed_BLND)

    @layer_method
    def project(
        self, theta: NestedMap, x_BLM: tf.Tensor, positions: rotary.TextPositions
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns queries [B,L,N,D], keys [B,L,D] and the latent vectors [B,L,q] of queries."""
        low_BLq = product(self, theta, "w_query_down", "BLM,Mq->BLq", x_BLM)
        low_BLq = self.query_down_norm.fprop(theta.query_down_norm, low_BLq)
        query_BLND = product(self, theta, "w_query", "BLq,qND->BLND", low_BLq)
        query_BLND = self.query_norm.fprop(theta.query_norm, query_BLND)
        key_BLD = product(self, theta, "w_key", "BLM,MD->BLD", x_BLM)
        key_BLD = self.key_norm.fprop(theta.key_norm, key_BLD)
        query_BLND = annotate(rotate_last(query_BLND, positions, self.p, self.scaling), "BLND")
        key_BLD = rotate_last(key_BLD[:, :, None], positions, self.p, self.scaling)[:, :, 0]
        return query_BLND, annotate(key_BLD, "BLD"), low_BLq

    @layer_method
    def choose(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        low_BLq: tf.Tensor,
        positions: rotary.TextPositions,
        index_BKD: tf.Tensor | None,
        bias_BLK: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the bias [B,L,K] that also masks the windows that the indexer does not choose.

        Args:
          x_BLM: the tokens that attend.
          low_BLq: latent vectors of their queries.
          bias_BLK: float32 bias of the logits, as without an indexer.
        """
        p = self.p
        if index_BKD is None or index_BKD.shape[1] <= p.index_topk:
            return bias_BLK
        query_BLND = products.multiply("BLq,qND->BLND", low_BLq, theta.w_index_query)
        query_BLND = rotate_last(query_BLND, positions, p, self.scaling)
        head_BLN = products.multiply("BLM,MN->BLN", x_BLM, theta.w_index_head)
        return chosen_bias(query_BLND, index_BKD, head_BLN, bias_BLK, p.index_topk)

    @layer_method
    def output(
        self, theta: NestedMap, mixed_BLND: tf.Tensor, gate_BLND: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Returns the layer's output [B,L,M] for the weighted keys of all heads."""
        assert gate_BLND is None
        batch, length, _, _ = known_sizes(mixed_BLND.shape)
        grouped_BLND = tf.reshape(mixed_BLND, [batch, length, self.p.output_groups, -1])
        grouped_BLND = annotate(grouped_BLND, "BLND")
        low_BLNr = product(self, theta, "w_out_down", "BLND,NDr->BLNr", grouped_BLND)
        y_BLM = product(self, theta, "w_out", "BLNr,NrM->BLM", low_BLNr)
        return add_bias(y_BLM, theta.b_out) if self.p.use_output_bias else y_BLM


_ROTATION = ("rotary_base", "rotary_scaling", "rotary_pairs")


@flops.register(CompressedAttention)
def _(layer: CompressedAttention, shape: TokenShape) -> int:
    """Counts the windows that the indexer chooses, and its scores of all earlier ones."""
    p = layer.p
    inner, indexed, series = p.num_heads * p.head_dim, p.index_heads * p.index_dim, 1 + p.overlaps
    weights = p.model_dim * (p.query_rank + p.head_dim) + p.query_rank * (inner + indexed)
    weights += inner * p.output_rank + p.output_groups * p.output_rank * p.model_dim
    pairs, scores = visible_pairs(layer, shape), 0
    if p.compressed:
        dims = p.head_dim + (p.index_dim if p.index_heads else 0)
        weights += p.model_dim * (2 * series * dims + p.index_heads)
        seen = [(t + 1) // p.compressed for t in range(shape.length * shape.has_pairs)]
        pairs += sum(min(n, p.index_topk) if p.index_heads else n for n in seen)
        scores = sum(seen) * (indexed + p.index_heads)
    return 2 * (shape.tokens * weights + shape.rows * (2 * pairs * inner + scores))


@extend.register(CompressedAttention)
def _(
    layer: CompressedAttention,
    theta: NestedMap,
    x_BLM: tf.Tensor,
    view: CacheView,
    visible: Visible,
    cache: NestedMap | None = None,
) -> tuple[tf.Tensor, NestedMap]:
    """Caches the near keys, the keys of all windows, and what the open window has read.

    Without a cache, the new tokens are rows that end with their texts.
    """
    if cache is None:
        assert visible.mask is not None and visible.mask.segments_BL is not None
        y_BLM, made = layer.run_rows(theta, x_BLM, visible.mask)
        return y_BLM, _state_of_rows(layer, made)
    p, (batch, length, _) = layer.p, known_sizes(x_BLM.shape)
    check_one_text(layer, length)
    old = {
        name: tf.cast(tf.reshape(x, [batch, *known_sizes(x.shape)[-2:]]), x_BLM.dtype)
        for name, x in cache.items()
    }
    position_BL, new = view.positions_BL, {}
    positions = rotary.TextPositions(position_BL)
    query_BLND, key_BLD, low_BLq = layer.project(theta, x_BLM, positions)
    keys_BKD = tf.concat([old["near"], key_BLD], 1)
    new["near"] = keys_BKD[:, 1:]
    is_near_BLK = tf.range(keys_BKD.shape[1])[::-1] <= position_BL[..., None]
    keys = [KeyBlocks.of_row(keys_BKD, tf.where(is_near_BLK, 0.0, MASKED))]
    for name, compressor in layer.compressors.items():
        both_BLf = tf.reshape(compressor.project(theta[name], x_BLM), [batch, 1, -1])
        new[f"{name}_open"] = open_BKf = tf.concat([old[f"{name}_open"][:, 1:], both_BLf], 1)
        shape = [batch, -1, p.compressed, 2 * (1 + p.overlaps), compressor.p.key_dim]
        start_BK = position_BL + 1 - p.compressed * tf.range(1 + p.overlaps, 0, -1)
        made_BKD = compressor.pool(theta[name], tf.reshape(open_BKf, shape), start_BK)[:, -1:]
        number_K = tf.range(old[name].shape[1])
        closes_BK = tf.equal(number_K * p.compressed, position_BL + 1 - p.compressed)
        new[name] = tf.where(closes_BK[..., None], made_BKD, old[name])
    if p.compressed:
        is_over_BLK = number_K < ((position_BL + 1) // p.compressed)[..., None]
        more_BLK, index_BKD = tf.where(is_over_BLK, 0.0, MASKED), new.get("index_compressor")
        more_BLK = layer.choose(theta, x_BLM, low_BLq, positions, index_BKD, more_BLK)
        keys.append(KeyBlocks.of_row(new["compressor"], more_BLK))
    y_BLM = layer.mix(theta, query_BLND, keys, positions)
    states = {n: tf.reshape(tf.cast(x, tf.float32), cache[n].shape) for n, x in new.items()}
    return y_BLM, NestedMap(states)


def _state_of_rows(layer: CompressedAttention, made: NestedMap) -> NestedMap:
    """Returns the arrays of `state_shapes` for rows, with as many windows as the rows have."""
    segments_BL, state = made.pop("segments"), NestedMap()
    batch, length = known_sizes(segments_BL.shape)
    is_last_BL1 = tf.equal(segments_BL, segments_BL[:, -1:])[..., None]
    for name, (*_, count, size) in state_shapes(layer, batch, length).items():
        if name in layer.compressors:
            x_BKf = made.get(name, tf.zeros([batch, 0, size]))
        else:
            kept = min(count, length)
            x_BKf = tf.reshape(tf.cast(made[name], tf.float32), [batch, length, size])
            x_BKf = tf.where(is_last_BL1, x_BKf, 0.0)[:, length - kept :]
            x_BKf = tf.pad(x_BKf, [[0, 0], [count - kept, 0], [0, 0]])
        state[name] = tf.cast(x_BKf, tf.float32)[:, None]
    return state


@cache_shapes.register(CompressedAttention)
def _(layer: CompressedAttention, rows: int, slots: int) -> dict[str, tuple[int, ...]]:
    """Returns no shapes: windows are fewer than slots."""
    del layer, rows, slots
    return {}


@state_shapes.register(CompressedAttention)
def _(layer: CompressedAttention, rows: int, positions: int) -> dict[str, tuple[int, ...]]:
    p = layer.p
    shapes = {"near": (rows, 1, p.window, p.head_dim)}
    for name, compressor in layer.compressors.items():
        dim, series = compressor.p.key_dim, 1 + p.overlaps
        shapes[name] = (rows, 1, positions // p.compressed, dim)
        shapes[f"{name}_open"] = (rows, 1, series * p.compressed, 2 * series * dim)
    return shapes
