"""Multi-head attention: self, causal and cross, over packed rows, and one step at a time."""

import math

import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.params import Params
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.sharding import annotate, einsum

_MASKED = -1e9

# Heads before positions: the order in which the products of one position read them without a copy.
_CACHE_LAYOUT = "BNKD"


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
        return self._attend(theta, *projected, bias_B1LK, "BKND")

    def _project(self, theta: NestedMap, x_BLM: tf.Tensor, *weights: str) -> tuple:
        """Projections [B,L,N,D] of x, in one product: small ones leave a CPU's cores waiting."""
        w_MND = tf.concat([tf.cast(theta[name], x_BLM.dtype) for name in weights], axis=-1)
        projected = tf.split(einsum("BLM,MND->BLND", x_BLM, w_MND), len(weights), axis=-1)
        return tuple(annotate(x_BLND, "BLND") for x_BLND in projected)

    def _attend(
        self,
        theta: NestedMap,
        query_BLND: tf.Tensor,
        keys: tf.Tensor,
        values: tf.Tensor,
        bias_B1LK: tf.Tensor,
        memory_layout: str,
    ) -> tf.Tensor:
        """Returns [B,L,M]; keys and values are in `memory_layout`; the softmax is float32."""
        dtype = query_BLND.dtype
        query_BLND *= tf.constant(1.0 / math.sqrt(self.head_dim), dtype)
        logits_BNLK = einsum(f"BLND,{memory_layout}->BNLK", query_BLND, keys)
        weights_BNLK = tf.nn.softmax(tf.cast(logits_BNLK, tf.float32) + bias_B1LK)
        weights_BNLK = self.dropout.fprop(theta.dropout, tf.cast(weights_BNLK, dtype))
        mixed_BLND = einsum(f"BNLK,{memory_layout}->BLND", weights_BNLK, values)
        y_BLM = einsum("BLND,NDM->BLM", mixed_BLND, tf.cast(theta.w_out, dtype))
        return self.observe(y_BLM)

    def init_cache(self, batch: int, length: int, dtype: tf.DType) -> NestedMap:
        """Returns empty keys and values [B,N,K,D] for `length` steps of self-attention."""
        shape = [batch, self.p.num_heads, length, self.head_dim]
        zeros = tf.zeros(shape, dtype)
        return NestedMap(key=zeros, value=zeros)

    def cache_memory(self, theta: NestedMap, memory_BKM: tf.Tensor) -> NestedMap:
        """Returns the keys and values [B,N,K,D] of a memory that every step attends to."""
        keys_BKND, values_BKND = self._project(theta, memory_BKM, "w_key", "w_value")
        return NestedMap(key=_to_cache(keys_BKND), value=_to_cache(values_BKND))

    def attend_to_cache(
        self, theta: NestedMap, x_B1M: tf.Tensor, cache: NestedMap, bias_B11K: tf.Tensor
    ) -> tf.Tensor:
        """Returns [B,1,M]: one position attends to what a cache holds."""
        (query_B1ND,) = self._project(theta, x_B1M, "w_query")
        return self._attend(theta, query_B1ND, cache.key, cache.value, bias_B11K, _CACHE_LAYOUT)

    def extend_step(
        self, theta: NestedMap, x_B1M: tf.Tensor, step: tf.Tensor, cache: NestedMap
    ) -> tuple[tf.Tensor, NestedMap]:
        """Returns ([B,1,M], cache): position `step` attends to itself and those before it."""
        query, key, value = self._project(theta, x_B1M, "w_query", "w_key", "w_value")
        cache = NestedMap(
            key=_write_step(cache.key, _to_cache(key), step),
            value=_write_step(cache.value, _to_cache(value), step),
        )
        length = cache.key.shape[2]
        bias = tf.where(tf.range(length) <= step, 0.0, _MASKED)[None, None, None, :]
        return self._attend(theta, query, cache.key, cache.value, bias, _CACHE_LAYOUT), cache


def _to_cache(x_BKND: tf.Tensor) -> tf.Tensor:
    return annotate(tf.transpose(x_BKND, (0, 2, 1, 3)), _CACHE_LAYOUT)


def _write_step(cache_BNKD: tf.Tensor, new_BN1D: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    at_step = tf.equal(tf.range(cache_BNKD.shape[2]), step)[None, None, :, None]
    return tf.where(at_step, new_BN1D, cache_BNKD)
