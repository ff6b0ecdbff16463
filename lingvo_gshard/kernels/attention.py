"""Fused attention: softmax(q k + bias) v without a tensor of queries by keys in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.kernels import attention_cuda, attention_tpu
from lingvo_gshard.kernels.call import AttentionCall
from lingvo_gshard.kernels.kernel import Kernel, platform_in_use, register

_MODULES = {"tpu": attention_tpu, "cuda": attention_cuda}

FORWARD = register(
    Kernel(
        "attention",
        AttentionCall,
        {
            "tpu": attention_tpu.forward,
            "tpu_interpreted": attention_tpu.interpreted_forward,
            "cuda": attention_cuda.forward,
            "cuda_interpreted": attention_cuda.interpreted_forward,
        },
    )
)
BACKWARD = register(
    Kernel(
        "attention_gradient",
        AttentionCall,
        {
            "tpu": attention_tpu.backward,
            "tpu_interpreted": attention_tpu.interpreted_backward,
            "cuda": attention_cuda.backward,
            "cuda_interpreted": attention_cuda.interpreted_backward,
        },
    )
)


def obstacle(
    platform: str,
    call: AttentionCall,
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
) -> str:
    """Returns why a platform's kernel cannot compute an attention; "" if it can.

    Args:
      platform: one of `kernel.PLATFORMS`.
      call: the static arguments.
      query_BNLD: queries.
      keys_BNKD: keys.
      values_BNKD: values.
    """
    shapes = [tuple(known_sizes(x.shape)) for x in (query_BNLD, keys_BNKD, values_BNKD)]
    query, keys, values = shapes
    return _MODULES[platform.partition("_")[0]].obstacle(
        call, query, keys, values, query_BNLD.dtype.name
    )


def attend(
    call: AttentionCall,
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    segments: Sequence[tf.Tensor] = (),
    sinks: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Returns the attention output [B,N,L,D], with the D of the values, on one device.

    Consecutive heads of queries share a head of keys and values if these have fewer heads. The
    output of a query that no key is visible to is finite, and otherwise undefined.

    Args:
      call: the static arguments.
      query_BNLD: queries, already scaled.
      keys_BNKD: keys.
      values_BNKD: values.
      segments: int32 segments [B,L] of the queries and [B,K] of the keys, if the call has them.
      sinks: float32 logits [N], if the call has them.
    """
    batch, heads, queries, _ = known_sizes(query_BNLD.shape)
    mixed = tf.TensorSpec([batch, heads, queries, values_BNKD.shape[-1]], query_BNLD.dtype)
    normalizers = tf.TensorSpec([batch, heads, queries], tf.float32)

    share = _MODULES[platform_in_use().partition("_")[0]].computed_share(
        call, queries, known_sizes(keys_BNKD.shape)[2]
    )

    @custom_gradient
    def compute(query: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, *others: tf.Tensor) -> Any:
        operands = [query, keys, values, *others]
        mixed_BNLD, log_sums_BNL = FORWARD.mark(call, operands, [mixed, normalizers], share)

        def gradient(d_mixed_BNLD: tf.Tensor) -> list[tf.Tensor | None]:
            d_operands = [*operands[:3], *sinks]
            marked = BACKWARD.mark(
                call,
                [*operands, mixed_BNLD, log_sums_BNL, d_mixed_BNLD],
                [tf.TensorSpec(x.shape, x.dtype) for x in d_operands],
                share,
            )
            return [*marked[:3], *[None] * len(segments), *marked[3:]]

        return mixed_BNLD, gradient

    return compute(query_BNLD, keys_BNKD, values_BNKD, *segments, *sinks)
