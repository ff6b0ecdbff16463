"""Multi-head attention: self, causal and cross, over packed rows, and one step at a time."""

import math

import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.gradients import custom_gradient
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.params import Params
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.sharding import annotate, einsum

_MASKED = -1e9


def segment_bias(
    query_segments_BL: tf.Tensor, memory_segments_BK: tf.Tensor, causal: bool = False
) -> tf.Tensor:
    """Returns float32 [B,1,L,K]: 0 where a query may see a key, else a large negative number.

    A query sees the keys of its own segment; segment 0 is padding, and a causal query sees no key
    that stands after it in the row.
    """
    query_BL1 = query_segments_BL[:, :, None]
    visible_BLK = tf.equal(query_BL1, memory_segments_BK[:, None, :]) & (query_BL1 > 0)
    if causal:
        length = query_segments_BL.shape[1]
        visible_BLK &= tf.range(length)[:, None] >= tf.range(length)[None, :]
    return tf.where(visible_BLK, 0.0, _MASKED)[:, None]


class MultiHeadAttention(Layer):
    """softmax(q k / sqrt(D) + bias) v over N heads. Vaswani et al. 2017, arXiv 1706.03762, 3.2."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("num_heads", 0, "Size of N.")
        p.define("head_dim", 0, "Size of D; 0 for M / N.")
        p.define("dropout_rate", 0.0, "Share of attention weights dropped in training.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.num_heads < 1 or (not p.head_dim and p.model_dim % p.num_heads):
            raise ValueError(
                f"{path}.num_heads: {p.num_heads} heads do not divide model_dim {p.model_dim}"
            )
        self.head_dim = p.head_dim or p.model_dim // p.num_heads
        sizes = {"M": p.model_dim, "N": p.num_heads, "D": self.head_dim}
        inner = p.num_heads * self.head_dim
        project = initializers.glorot_uniform(p.model_dim, inner)
        for name in ("w_query", "w_key", "w_value"):
            self.create_variable(name, "MND", sizes, project)
        self.create_variable("w_out", "NDM", sizes, project)
        self.create_child("dropout", Dropout.params().set(rate=p.dropout_rate))

    def fprop(
        self, theta: NestedMap, x_BLM: tf.Tensor, memory_BKM: tf.Tensor, bias_B1LK: tf.Tensor
    ) -> tf.Tensor:
        """Returns [B,L,M]: x attends to memory (x itself for self-attention)."""
        if memory_BKM is x_BLM:
            projected = self._project(theta, x_BLM, "w_query", "w_key", "w_value")
        else:
            projected = (
                *self._project(theta, x_BLM, "w_query"),
                *self._project(theta, memory_BKM, "w_key", "w_value"),
            )
        return self._attend(theta, *map(_heads_first, projected), bias_B1LK)

    def _project(self, theta: NestedMap, x_BLM: tf.Tensor, *weights: str) -> tuple:
        """Projections [B,L,N,D] of x, in one product: small ones leave a CPU's cores waiting."""
        w_MND = tf.concat([tf.cast(theta[name], x_BLM.dtype) for name in weights], axis=-1)
        projected = tf.split(einsum("BLM,MND->BLND", x_BLM, w_MND), len(weights), axis=-1)
        return tuple(annotate(x_BLND, "BLND") for x_BLND in projected)

    def _attend(
        self,
        theta: NestedMap,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        bias_B1LK: tf.Tensor,
    ) -> tf.Tensor:
        """Returns [B,L,M]; the softmax is float32."""
        query_BNLD *= tf.constant(1.0 / math.sqrt(self.head_dim), query_BNLD.dtype)
        shape_BNLK = (*query_BNLD.shape[:3], keys_BNKD.shape[2])
        mask_BNLK = self.dropout.fprop(theta.dropout, tf.ones(shape_BNLK, query_BNLD.dtype))
        mixed_BNLD = _mix(query_BNLD, keys_BNKD, values_BNKD, bias_B1LK, mask_BNLK)
        mixed_BLND = annotate(tf.transpose(mixed_BNLD, (0, 2, 1, 3)), "BLND")
        y_BLM = einsum("BLND,NDM->BLM", mixed_BLND, tf.cast(theta.w_out, mixed_BLND.dtype))
        return self.observe(y_BLM)

    def init_cache(self, batch: int, length: int, dtype: tf.DType) -> NestedMap:
        """Returns empty keys and values [B,N,K,D] for `length` steps of self-attention."""
        shape = [batch, self.p.num_heads, length, self.head_dim]
        zeros = tf.zeros(shape, dtype)
        return NestedMap(key=zeros, value=zeros)

    def cache_memory(self, theta: NestedMap, memory_BKM: tf.Tensor) -> NestedMap:
        """Returns the keys and values [B,N,K,D] of a memory that every step attends to."""
        keys_BKND, values_BKND = self._project(theta, memory_BKM, "w_key", "w_value")
        return NestedMap(key=_heads_first(keys_BKND), value=_heads_first(values_BKND))

    def attend_to_cache(
        self, theta: NestedMap, x_B1M: tf.Tensor, cache: NestedMap, bias_B11K: tf.Tensor
    ) -> tf.Tensor:
        """Returns [B,1,M]: one position attends to what a cache holds."""
        (query_B1ND,) = self._project(theta, x_B1M, "w_query")
        return self._attend(theta, _heads_first(query_B1ND), cache.key, cache.value, bias_B11K)

    def extend_step(
        self, theta: NestedMap, x_B1M: tf.Tensor, step: tf.Tensor, cache: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns ([B,1,M], cache): position `step` attends to itself and those before it."""
        projected = self._project(theta, x_B1M, "w_query", "w_key", "w_value")
        query, key, value = map(_heads_first, projected)
        cache = NestedMap(
            key=_write_step(cache.key, key, step),
            value=_write_step(cache.value, value, step),
        )
        length = cache.key.shape[2]
        bias = tf.where(tf.range(length) <= step, 0.0, _MASKED)[None, None, None, :]
        return self._attend(theta, query, cache.key, cache.value, bias), cache


def _heads_first(x_BKND: tf.Tensor) -> tf.Tensor:
    """[B,N,K,D]: the order in which products of positions read them, both ways, without a copy."""
    return annotate(tf.transpose(x_BKND, (0, 2, 1, 3)), "BNKD")


def _mix(
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    bias_B1LK: tf.Tensor,
    mask_BNLK: tf.Tensor,
) -> tf.Tensor:
    """Returns (softmax(q k + bias) * mask) v [B,N,L,D]; bias and mask have no gradient.

    The softmax is divided by its sum after the product with the values, and in the gradient the
    sum over K of weights times their gradients is taken over D (Dao et al. 2022, arXiv 2205.14135,
    appendix B): each way a tensor [B,N,L,K] less to pass over.
    """
    dtype = query_BNLD.dtype

    @custom_gradient
    def compute(query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor, values_BNKD: tf.Tensor):
        logits_BNLK = einsum("BNLD,BNKD->BNLK", query_BNLD, keys_BNKD)
        logits_BNLK = tf.cast(logits_BNLK, tf.float32) + bias_B1LK
        exponentials_BNLK = tf.exp(logits_BNLK - tf.reduce_max(logits_BNLK, -1, keepdims=True))
        sum_BNL1 = tf.cast(tf.reduce_sum(exponentials_BNLK, -1, keepdims=True), dtype)
        exponentials_BNLK = tf.cast(exponentials_BNLK, dtype)
        weights_BNLK = exponentials_BNLK * mask_BNLK
        mixed_BNLD = einsum("BNLK,BNKD->BNLD", weights_BNLK, values_BNKD) / sum_BNL1

        def gradient(d_mixed_BNLD: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            d_BNLD = d_mixed_BNLD / sum_BNL1
            total_BNL1 = tf.reduce_sum(d_BNLD * mixed_BNLD, -1, keepdims=True)
            d_weights_BNLK = einsum("BNLD,BNKD->BNLK", d_BNLD, values_BNKD)
            d_logits_BNLK = exponentials_BNLK * (d_weights_BNLK * mask_BNLK - total_BNL1)
            return (
                einsum("BNLK,BNKD->BNLD", d_logits_BNLK, keys_BNKD),
                einsum("BNLK,BNLD->BNKD", d_logits_BNLK, query_BNLD),
                einsum("BNLK,BNLD->BNKD", weights_BNLK, d_BNLD),
            )

        return mixed_BNLD, gradient

    return compute(query_BNLD, keys_BNKD, values_BNKD)


def _write_step(cache_BNKD: tf.Tensor, new_BN1D: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    at_step = tf.equal(tf.range(cache_BNKD.shape[2]), step)[None, None, :, None]
    return tf.where(at_step, new_BN1D, cache_BNKD)
