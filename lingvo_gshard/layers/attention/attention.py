"""Multi-head attention: self, causal and cross, over packed rows, and one step at a time."""

import math

import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention import blockwise, relative_bias, rotary
from lingvo_gshard.layers.attention import ring as ring_attention
from lingvo_gshard.layers.attention.relative_bias import MASKED
from lingvo_gshard.layers.attention.soft_cap import soft_cap, through_soft_cap
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.sharding import annotate, einsum

# Params that go by how far apart tokens of one row stand, which those of two rows do not.
_OF_ONE_ROW = {"rotary_fraction": 0.0, "relative_buckets": 0, "window": 0, "is_causal": False}


class MultiHeadAttention(Layer):
    """softmax(q k / sqrt(D) + bias) v over N heads. Vaswani et al. 2017, arXiv 1706.03762, 3.2."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("num_heads", 0, "Size of N.")
        p.define("head_dim", 0, "Size of D; 0 for M / N.")
        p.define("dropout_rate", 0.0, "Share of attention weights dropped in training.")
        p.define(
            "num_key_value_heads",
            0,
            "Heads of keys and values, each read by as many heads of queries (arXiv 2305.13245, "
            "section 2.2); 0 for num_heads.",
        )
        p.define("qk_norm", False, "Whether queries and keys are normalized over D (RMSNorm).")
        p.define("rotary_fraction", 0.0, "Share of D that is turned by position; 0: none.")
        p.define("rotary_base", 10000.0, "What the wave lengths of rotary positions grow up to.")
        p.define("relative_buckets", 0, "Buckets of distances, each with a bias; 0: no bias.")
        p.define("relative_max_distance", 128, "Distance from which on the bucket is the last.")
        p.define("window", 0, "How many positions away a key may be; 0: any.")
        p.define("logit_cap", 0.0, "c of c tanh(q k / c), instead of q k; 0: none.")
        p.define(
            "block_size",
            0,
            "Keys that are read at a time, so that no tensor has queries by keys; 0: all.",
        )
        p.define(
            "key_exchange",
            ring_attention.ALL_GATHER,
            "How queries get at keys that are elsewhere, where L is split: 'all_gather', every "
            "device gets all of them (arXiv 2407.21783, section 3.3.2), or 'ring', they go around.",
        )
        p.define("is_causal", False, "Whether callers let no query see a key after it.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.num_heads < 1 or (not p.head_dim and p.model_dim % p.num_heads):
            raise ValueError(
                f"{path}.num_heads: {p.num_heads} heads do not divide model_dim {p.model_dim}"
            )
        self.head_dim = p.head_dim or p.model_dim // p.num_heads
        self.key_value_heads = p.num_key_value_heads or p.num_heads
        if self.key_value_heads < 1 or p.num_heads % self.key_value_heads:
            raise ValueError(
                f"{path}.num_key_value_heads: {p.num_key_value_heads} do not divide "
                f"{path}.num_heads, {p.num_heads}"
            )
        if p.logit_cap < 0:
            raise ValueError(f"{path}.logit_cap: {p.logit_cap} is negative")
        rotary.check(p, self.head_dim, path)
        relative_bias.check(p, path)
        blockwise.check(p, path)
        ring_attention.check(p, path)
        self._create_weights()
        self.create_child("dropout", Dropout.params().set(rate=p.dropout_rate))

    def _create_weights(self) -> None:
        p = self.p
        sizes = {"M": p.model_dim, "N": p.num_heads, "D": self.head_dim}
        project = initializers.glorot_uniform(p.model_dim, p.num_heads * self.head_dim)
        key_value_sizes = {**sizes, "N": self.key_value_heads}
        shared = initializers.glorot_uniform(p.model_dim, self.key_value_heads * self.head_dim)
        self.create_variable("w_query", "MND", sizes, project)
        self.create_variable("w_key", "MND", key_value_sizes, shared)
        self.create_variable("w_value", "MND", key_value_sizes, shared)
        self.create_variable("w_out", "NDM", sizes, project)
        if p.relative_buckets:
            sizes = {"K": p.relative_buckets, "N": p.num_heads}
            zeros = initializers.constant(0.0)
            self.create_variable("relative_bias", "KN", sizes, zeros, unsplit="K")
        if p.qk_norm:
            for name in ("query_norm", "key_norm"):
                self.create_child(name, RMSNorm.params().set(model_dim=self.head_dim))

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_BLM: tf.Tensor,
        memory_BKM: tf.Tensor,
        bias_B1LK: tf.Tensor,
        segments_BL: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """Returns [B,L,M]: x attends to memory (x itself for self-attention).

        segments_BL: of x, in each of which rotary positions begin at 0; without it in each row.
        With `takes_segments` it is needed, and there is no bias: in its place stand the int32
        segments [B,K] of the memory, and queries see of their own what `is_causal` says.
        A ring has as many parts as the partitioning in use splits L into; where there is none, or
        it splits no L, it is one part, and equal to attention without a ring.
        Raises ValueError if a memory other than x is to be attended to by distance, if blocks or a
        ring have no segments, and if a ring's parts cannot be equal.
        """
        if memory_BKM is x_BLM:
            projected = self._project_row(theta, x_BLM, self._positions(x_BLM, segments_BL))
        else:
            projected = (
                self._project_query(theta, x_BLM),
                *self._project_memory(theta, memory_BKM),
            )
        query_BNLD = _heads_first(projected[0], "BNLD")
        layout = "BNLD" if self.p.key_exchange == ring_attention.RING else "BNKD"
        keys_and_values = (_heads_first(x_BKND, layout) for x_BKND in projected[1:])
        if takes_segments(self.p):
            return self._attend_by_segments(
                theta, query_BNLD, *keys_and_values, segments_BL, bias_B1LK
            )
        return self._attend(theta, query_BNLD, *keys_and_values, bias_B1LK)

    def _positions(self, x_BLM: tf.Tensor, segments_BL: tf.Tensor | None) -> tf.Tensor | None:
        """Positions [B,L], or of all rows alike [1,L], where anything goes by them."""
        if not self.p.rotary_fraction:
            return None
        if segments_BL is None:
            return tf.range(x_BLM.shape[1])[None]
        return rotary.positions_in_segments(segments_BL)

    @layer_method
    def _project_row(
        self, theta: NestedMap, x_BLM: tf.Tensor, positions_BL: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Queries, keys and values [B,L,N,D] of the same tokens; positions for rotary ones."""
        p = self.p
        if self.key_value_heads == p.num_heads:
            query, key, value = self._project(theta, x_BLM, "w_query", "w_key", "w_value")
        else:
            (query,) = self._project(theta, x_BLM, "w_query")
            key, value = self._project(theta, x_BLM, "w_key", "w_value")
        query, key = self._norm("query", theta, query), self._norm("key", theta, key)
        if p.rotary_fraction:
            query, key = (
                rotary.rotate(x_BLND, positions_BL, p.rotary_fraction, p.rotary_base)
                for x_BLND in (query, key)
            )
        return query, key, value

    @layer_method
    def _project_query(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        (query_BLND,) = self._project(theta, x_BLM, "w_query")
        return self._norm("query", theta, query_BLND)

    @layer_method
    def _project_memory(
        self, theta: NestedMap, memory_BKM: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        for name in ("rotary_fraction", "relative_buckets", "window"):
            if self.p.get(name):
                raise ValueError(
                    f"{self.path}.{name}: {self.p.get(name)} goes by distance, and a memory is at "
                    "none; 0 was expected"
                )
        key_BKND, value_BKND = self._project(theta, memory_BKM, "w_key", "w_value")
        return self._norm("key", theta, key_BKND), value_BKND

    @layer_method
    def _project(self, theta: NestedMap, x_BLM: tf.Tensor, *weights: str) -> tuple:
        """Projections [B,L,N,D] of x, in one product: small ones leave a CPU's cores waiting."""
        w_MND = tf.concat([tf.cast(theta[name], x_BLM.dtype) for name in weights], axis=-1)
        projected = tf.split(einsum("BLM,MND->BLND", x_BLM, w_MND), len(weights), axis=-1)
        return tuple(annotate(x_BLND, "BLND") for x_BLND in projected)

    def _norm(self, name: str, theta: NestedMap, x_BLND: tf.Tensor) -> tf.Tensor:
        """Dehghani et al. 2023, arXiv 2302.05442, section 2, with the norm of arXiv 1910.07467."""
        if not self.p.qk_norm:
            return x_BLND
        return self.children[f"{name}_norm"].fprop(theta[f"{name}_norm"], x_BLND)

    @layer_method
    def _attend(
        self,
        theta: NestedMap,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        bias_B1LK: tf.Tensor,
        first: int | tf.Tensor = 0,
    ) -> tf.Tensor:
        """Returns [B,L,M]; the softmax is float32. first: where in the row the first query is."""
        query_BNLD = self._scaled(query_BNLD)
        keys_BNKD, values_BNKD = map(self._for_all_heads, (keys_BNKD, values_BNKD))
        shape_BNLK = (*query_BNLD.shape[:3], keys_BNKD.shape[2])
        mask_BNLK = self.dropout.fprop(theta.dropout, tf.ones(shape_BNLK, query_BNLD.dtype))
        learned = ()
        if self.p.window or self.p.relative_buckets:
            distances_LK = tf.range(shape_BNLK[3])[None, :] - (
                first + tf.range(shape_BNLK[2])[:, None]
            )
            if self.p.window:
                bias_B1LK += relative_bias.window_bias(distances_LK, self.p.window)
            if self.p.relative_buckets:
                learned = (self._relative_bias(theta, distances_LK),)
        mixed_BNLD = _mix(
            query_BNLD,
            keys_BNKD,
            values_BNKD,
            *learned,
            bias_B1LK=bias_B1LK,
            mask_BNLK=mask_BNLK,
            cap=self.p.logit_cap,
        )
        return self._output(theta, mixed_BNLD)

    @layer_method
    def _attend_by_segments(
        self,
        theta: NestedMap,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        segments_BL: tf.Tensor | None,
        key_segments_BK: tf.Tensor,
    ) -> tf.Tensor:
        p = self.p
        is_ring = p.key_exchange == ring_attention.RING
        option = "key_exchange" if is_ring else "block_size"
        if segments_BL is None:
            raise ValueError(f"{self.path}.{option}: {p.get(option)!r} needs the segments of x")
        sees = segments_BL, key_segments_BK, p.block_size, p.is_causal, p.window, p.logit_cap
        if is_ring:
            ring = ring_attention.Ring(*sees, f"{self.path}.{option}")
            mixed_BNLD = ring.attend(self._scaled(query_BNLD), keys_BNKD, values_BNKD)
        else:
            keys_BNKD, values_BNKD = map(self._for_all_heads, (keys_BNKD, values_BNKD))
            blocks = blockwise.Blocks(*sees)
            mixed_BNLD = blocks.attend(self._scaled(query_BNLD), keys_BNKD, values_BNKD)
        return self._output(theta, mixed_BNLD)

    def _scaled(self, query_BNLD: tf.Tensor) -> tf.Tensor:
        return query_BNLD * tf.constant(1.0 / math.sqrt(self.head_dim), query_BNLD.dtype)

    @layer_method
    def _output(self, theta: NestedMap, mixed_BNLD: tf.Tensor) -> tf.Tensor:
        mixed_BLND = annotate(tf.transpose(mixed_BNLD, (0, 2, 1, 3)), "BLND")
        y_BLM = einsum("BLND,NDM->BLM", mixed_BLND, tf.cast(theta.w_out, mixed_BLND.dtype))
        return self.observe(y_BLM)

    def _for_all_heads(self, x_BNKD: tf.Tensor) -> tf.Tensor:
        """Each head of keys or values as often as heads of queries read it."""
        times = self.p.num_heads // self.key_value_heads
        return x_BNKD if times == 1 else _repeat_heads(x_BNKD, times)

    @layer_method
    def _relative_bias(self, theta: NestedMap, distances_LK: tf.Tensor) -> tf.Tensor:
        p = self.p
        buckets_LK = relative_bias.buckets_of(
            distances_LK, p.relative_buckets, p.relative_max_distance, p.is_causal
        )
        return relative_bias.bias_of(theta.relative_bias, buckets_LK)

    def init_cache(self, batch: int, length: int, dtype: tf.DType) -> NestedMap:
        """Returns empty keys and values [B,N,K,D] for `length` steps of self-attention.

        N is here, and in `cache_memory`, the number of heads of keys and values.
        """
        shape = [batch, self.key_value_heads, length, self.head_dim]
        zeros = tf.zeros(shape, dtype)
        return NestedMap(key=zeros, value=zeros)

    @layer_method
    def cache_memory(self, theta: NestedMap, memory_BKM: tf.Tensor) -> NestedMap:
        """Returns the keys and values [B,N,K,D] of a memory that every step attends to."""
        keys_BKND, values_BKND = self._project_memory(theta, memory_BKM)
        return NestedMap(key=_heads_first(keys_BKND), value=_heads_first(values_BKND))

    @layer_method
    def attend_to_cache(
        self, theta: NestedMap, x_B1M: tf.Tensor, cache: NestedMap, bias_B11K: tf.Tensor
    ) -> tf.Tensor:
        """Returns [B,1,M]: one position attends to what a cache holds of a memory."""
        query_B1ND = self._project_query(theta, x_B1M)
        return self._attend(theta, _heads_first(query_B1ND), cache.key, cache.value, bias_B11K)

    @layer_method
    def extend_step(
        self, theta: NestedMap, x_B1M: tf.Tensor, step: tf.Tensor, cache: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns ([B,1,M], cache): position `step` attends to itself and those before it."""
        projected = self._project_row(theta, x_B1M, tf.reshape(step, [1, 1]))
        query, key, value = map(_heads_first, projected)
        cache = NestedMap(
            key=_write_step(cache.key, key, step),
            value=_write_step(cache.value, value, step),
        )
        length = cache.key.shape[2]
        bias = tf.where(tf.range(length) <= step, 0.0, MASKED)[None, None, None, :]
        return self._attend(theta, query, cache.key, cache.value, bias, first=step), cache


def takes_segments(params: Params) -> bool:
    """Returns whether an attention of these Params takes the keys' segments in place of a bias."""
    return params.block_size > 0 or params.key_exchange == ring_attention.RING


def without_distances(params: Params) -> Params:
    """Returns the Params of a self-attention made those of an attention to another row."""
    return params.copy().set(**_OF_ONE_ROW)


def _heads_first(x_BKND: tf.Tensor, layout: str = "BNKD") -> tf.Tensor:
    """[B,N,K,D]: the order in which products of positions read them, both ways, without a copy.

    layout: "BNLD" of what stays where its positions are; that of queries, and of what a ring takes.
    """
    return annotate(tf.transpose(x_BKND, (0, 2, 1, 3)), layout)


def _repeat_heads(x_BNKD: tf.Tensor, times: int) -> tf.Tensor:
    """Each head `times` times in a row. In loops XLA knows no shape in tf.repeat's own gradient."""

    @custom_gradient
    def compute(x_BNKD: tf.Tensor):
        batch, heads, length, head_dim = x_BNKD.shape

        def gradient(d_BNKD: tf.Tensor) -> tf.Tensor:
            grouped = tf.reshape(d_BNKD, [batch, heads, times, length, head_dim])
            return annotate(tf.reduce_sum(grouped, 2), "BNKD")

        return annotate(tf.repeat(x_BNKD, times, axis=1), "BNKD"), gradient

    return compute(x_BNKD)


def _mix(
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    *learned_NLK: tf.Tensor,
    bias_B1LK: tf.Tensor,
    mask_BNLK: tf.Tensor,
    cap: float,
) -> tf.Tensor:
    """Returns (softmax(q k + learned + bias) * mask) v [B,N,L,D].

    learned: a bias that has a gradient, or none. cap: see `soft_cap`; of q k alone.
    The softmax is divided by its sum after the product with the values, and in the gradient the
    sum over K of weights times their gradients is taken over D (Dao et al. 2022, arXiv 2205.14135,
    appendix B): each way a tensor [B,N,L,K] less to pass over.
    """
    dtype = query_BNLD.dtype

    @custom_gradient
    def compute(
        query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor, values_BNKD: tf.Tensor, *learned: tf.Tensor
    ):
        logits_BNLK = einsum("BNLD,BNKD->BNLK", query_BNLD, keys_BNKD)
        capped_BNLK = logits_BNLK = soft_cap(tf.cast(logits_BNLK, tf.float32), cap)
        for more_NLK in learned:
            logits_BNLK += more_NLK
        logits_BNLK += bias_B1LK
        exponentials_BNLK = tf.exp(logits_BNLK - tf.reduce_max(logits_BNLK, -1, keepdims=True))
        sum_BNL1 = tf.cast(tf.reduce_sum(exponentials_BNLK, -1, keepdims=True), dtype)
        exponentials_BNLK = tf.cast(exponentials_BNLK, dtype)
        weights_BNLK = exponentials_BNLK * mask_BNLK
        mixed_BNLD = einsum("BNLK,BNKD->BNLD", weights_BNLK, values_BNKD) / sum_BNL1

        def gradient(d_mixed_BNLD: tf.Tensor) -> tuple[tf.Tensor, ...]:
            d_BNLD = d_mixed_BNLD / sum_BNL1
            d_float, mixed_float = (tf.cast(x, tf.float32) for x in (d_BNLD, mixed_BNLD))
            total_BNL1 = tf.reduce_sum(d_float * mixed_float, -1, keepdims=True)
            d_weights_BNLK = einsum("BNLD,BNKD->BNLK", d_BNLD, values_BNKD) * mask_BNLK
            d_logits_BNLK = tf.cast(exponentials_BNLK, tf.float32) * (
                tf.cast(d_weights_BNLK, tf.float32) - total_BNL1
            )
            d_learned = [tf.cast(tf.reduce_sum(d_logits_BNLK, 0), x.dtype) for x in learned]
            d_logits_BNLK = tf.cast(through_soft_cap(d_logits_BNLK, capped_BNLK, cap), dtype)
            return (
                einsum("BNLK,BNKD->BNLD", d_logits_BNLK, keys_BNKD),
                einsum("BNLK,BNLD->BNKD", d_logits_BNLK, query_BNLD),
                einsum("BNLK,BNLD->BNKD", weights_BNLK, d_BNLD),
                *d_learned,
            )

        return mixed_BNLD, gradient

    return compute(query_BNLD, keys_BNKD, values_BNKD, *learned_NLK)


def _write_step(cache_BNKD: tf.Tensor, new_BN1D: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    at_step = tf.equal(tf.range(cache_BNKD.shape[2]), step)[None, None, :, None]
    return tf.where(at_step, new_BN1D, cache_BNKD)
