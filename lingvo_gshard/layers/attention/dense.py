"""DenseKernel: attention with all logits in one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lingvo_gshard.core import Params, custom_gradient, tf
from lingvo_gshard.layers.attention import kernel
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.layers.attention.relative_bias import RelativeBias
from lingvo_gshard.sharding import einsum, platform_in_use


def soft_cap(x: tf.Tensor, cap: float) -> tf.Tensor:
    """Returns c tanh(x / c), or x if the cap c is 0."""
    return cap * tf.tanh(x / cap) if cap else x


def soft_cap_gradient(d_capped: tf.Tensor, capped: tf.Tensor, cap: float) -> tf.Tensor:
    """Returns the gradient of the argument of `soft_cap`, whose cap is 0 for none."""
    return d_capped * tf.cast(1.0 - tf.square(capped / cap), d_capped.dtype) if cap else d_capped


class DenseKernel(kernel.AttentionKernel):
    """Attends to all keys at once. Vaswani et al. 2017, arXiv 1706.03762, section 3.2.

    Programs for TPUs and GPUs use the platform's fused kernel, which never has all logits
    [B,N,L,K] in memory (docs/memory_and_communication.md). Where it cannot, and in all other
    programs, the logits are one tensor.

    If L is split over devices, every device gathers all keys and values (arXiv 2407.21783, section
    3.3.2).
    """

    supports_relative_bias = True
    is_vectorizable = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("use_fused", True, "Whether programs use the platform's fused kernel.")
        p.define(
            "most_segments",
            0,
            "The most segments of a row, taken from input.most_segments. GPUs from Hopper on then "
            "compute the segments of a row one by one, and NaN for a row with more; 0: unknown.",
            minimum=0,
        )
        return p

    @property
    def uses_fused(self) -> bool:
        """Whether training and generation use the platform's kernels, where there are any."""
        return self.p.use_fused

    def prepare(self, mask: AttentionMask) -> AttentionMask:
        """Returns the mask with its bias materialized, unless a fused kernel needs none."""
        if not self._may_fuse():
            return mask.with_bias()
        most = self.p.most_segments if mask.key_segments_BK is None else 0
        return dataclasses.replace(mask, most_segments=most)

    def prepare_bias(self, bias: RelativeBias, distances_LK: tf.Tensor) -> RelativeBias:
        """Computes the bias of each query and key, unless a fused kernel reads the table."""
        if self._may_fuse() and any(fused.reads_bias_tables() for fused in kernel.FUSED_ATTENTION):
            return bias
        return bias.at(distances_LK)

    def _may_fuse(self) -> bool:
        return self.p.use_fused and platform_in_use() != ""

    def attend(
        self,
        query_BNLD: tf.Tensor,
        keys_BNKD: tf.Tensor,
        values_BNKD: tf.Tensor,
        mask: AttentionMask,
        softmax: kernel.SoftmaxOptions = kernel.PLAIN,
    ) -> tf.Tensor:
        """Returns the attention output [B,N,L,D], as the base class describes."""
        for fused in kernel.FUSED_ATTENTION if self._may_fuse() else ():
            fused_BNLD = fused.attend(query_BNLD, keys_BNKD, values_BNKD, mask, softmax)
            if fused_BNLD is not None:
                return fused_BNLD
        shape_BNLK = kernel.weights_shape(query_BNLD, keys_BNKD)
        _, heads, queries, keys = shape_BNLK
        dropout_BNLK, biases = 1.0, []
        if softmax.relative_bias is not None:
            biases = [softmax.relative_bias.at(mask.distances(queries, keys)).bias_NLK]
        if softmax.dropout is not None:
            dropout_BNLK = softmax.dropout.factors(shape_BNLK, query_BNLD.dtype)
        return _attend(
            query_BNLD,
            kernel.repeat_heads(keys_BNKD, heads),
            kernel.repeat_heads(values_BNKD, heads),
            *biases,
            *([] if softmax.sinks_N is None else [softmax.sinks_N]),
            biases=len(biases),
            bias_B1LK=mask.bias(queries, keys),
            dropout_BNLK=dropout_BNLK,
            cap=softmax.cap,
        )


def _attend(
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    *learned: tf.Tensor,
    biases: int,
    bias_B1LK: tf.Tensor,
    dropout_BNLK: tf.Tensor | float,
    cap: float,
) -> tf.Tensor:
    """Returns (softmax(q k + biases) * dropout) v [B,N,L,D].

    The softmax is divided by its sum after the product with the values. The gradient takes the sum
    over K of weights times their gradients as a sum over D (Dao et al. 2022, arXiv 2205.14135, B).

    Args:
      query_BNLD: scaled queries.
      keys_BNKD, values_BNKD: keys and values, with as many heads as the queries.
      *learned: `biases` biases [N,L,K] that get a gradient, then float32 logits [N] of sinks.
      biases: 0 or 1.
      bias_B1LK: float32 bias without a gradient.
      dropout_BNLK: factor of the weights.
      cap: see `soft_cap`; applied before the biases.
    """
    dtype = query_BNLD.dtype

    @custom_gradient
    def compute(
        query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor, values_BNKD: tf.Tensor, *learned: tf.Tensor
    ):
        logits_BNLK = einsum("BNLD,BNKD->BNLK", query_BNLD, keys_BNKD)
        capped_BNLK = logits_BNLK = soft_cap(tf.cast(logits_BNLK, tf.float32), cap)
        for bias_BNLK in (*learned[:biases], bias_B1LK):
            logits_BNLK += bias_BNLK
        exponentials_BNLK, at_sinks, sum_BNL1 = _exponentials(logits_BNLK, learned[biases:])
        exponentials_BNLK, sum_BNL1 = (tf.cast(x, dtype) for x in (exponentials_BNLK, sum_BNL1))
        weights_BNLK = exponentials_BNLK * dropout_BNLK
        mixed_BNLD = einsum("BNLK,BNKD->BNLD", weights_BNLK, values_BNKD) / sum_BNL1

        def gradient(d_mixed_BNLD: tf.Tensor) -> tuple[tf.Tensor, ...]:
            d_BNLD = d_mixed_BNLD / sum_BNL1
            d_weights_BNLK = einsum("BNLD,BNKD->BNLK", d_BNLD, values_BNKD) * dropout_BNLK
            product_BNLD = tf.cast(d_BNLD, tf.float32) * tf.cast(mixed_BNLD, tf.float32)
            dot_BNL1 = tf.reduce_sum(product_BNLD, -1, keepdims=True)
            d_logits_BNLK = tf.cast(d_weights_BNLK, tf.float32) - dot_BNL1
            d_logits_BNLK *= tf.cast(exponentials_BNLK, tf.float32)
            d_biases = [tf.cast(tf.reduce_sum(d_logits_BNLK, 0), x.dtype) for x in learned[:biases]]
            d_sinks = [-tf.reduce_sum(at_BNL1 * dot_BNL1, (0, 2, 3)) for at_BNL1 in at_sinks]
            d_logits_BNLK = tf.cast(soft_cap_gradient(d_logits_BNLK, capped_BNLK, cap), dtype)
            return (
                einsum("BNLK,BNKD->BNLD", d_logits_BNLK, keys_BNKD),
                einsum("BNLK,BNLD->BNKD", d_logits_BNLK, query_BNLD),
                einsum("BNLK,BNLD->BNKD", weights_BNLK, d_BNLD),
                *d_biases,
                *d_sinks,
            )

        return mixed_BNLD, gradient

    return compute(query_BNLD, keys_BNKD, values_BNKD, *learned)


def _exponentials(
    logits_BNLK: tf.Tensor, sinks: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, list[tf.Tensor], tf.Tensor]:
    """Returns float32 exponentials of logits [B,N,L,K] and of sinks [N], if any, and their sum."""
    sinks = [tf.reshape(sinks_N, [1, -1, 1, 1]) for sinks_N in sinks]
    largest_BNL1 = tf.reduce_max(logits_BNLK, -1, keepdims=True)
    for sinks_1N11 in sinks:
        largest_BNL1 = tf.maximum(largest_BNL1, sinks_1N11)
    exponentials_BNLK = tf.exp(logits_BNLK - largest_BNL1)
    sum_BNL1 = tf.reduce_sum(exponentials_BNLK, -1, keepdims=True)
    at_sinks = [tf.exp(sinks_1N11 - largest_BNL1) for sinks_1N11 in sinks]
    for at_BNL1 in at_sinks:
        sum_BNL1 += at_BNL1
    return exponentials_BNLK, at_sinks, sum_BNL1
