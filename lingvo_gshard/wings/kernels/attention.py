"""Fused attention: softmax(q k + bias) v without a tensor of queries by keys in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import custom_gradient, known_sizes, tf
from lingvo_gshard.sharding import device_kind_in_use, hardware_of, platform_in_use
from lingvo_gshard.wings.kernels import attention_cuda, attention_cudnn, attention_tpu
from lingvo_gshard.wings.kernels.call import AttentionCall
from lingvo_gshard.wings.kernels.kernel import register

_MODULES = {"tpu": attention_tpu, "cuda": attention_cuda}

FORWARD = register(
    "attention", AttentionCall, tpu=attention_tpu.forward, cuda=attention_cuda.forward
)
BACKWARD = register(
    "attention_gradient", AttentionCall, tpu=attention_tpu.backward, cuda=attention_cuda.backward
)


def obstacle(
    platform: str,
    call: AttentionCall,
    query_BNLD: tf.Tensor | tf.TensorSpec,
    keys_BNKD: tf.Tensor | tf.TensorSpec,
    values_BNKD: tf.Tensor | tf.TensorSpec,
) -> str:
    """Returns why a platform's kernel cannot compute an attention; "" if it can."""
    shapes = [tuple(known_sizes(x.shape)) for x in (query_BNLD, keys_BNKD, values_BNKD)]
    query, keys, values = shapes
    return _MODULES[hardware_of(platform)].obstacle(
        call, query, keys, values, query_BNLD.dtype.name
    )


def with_packed_segments(call: AttentionCall, most: int, *arrays: tf.Tensor) -> AttentionCall:
    """Returns a call that computes the segments of rows one by one, if a kernel of the device can.

    Args:
      call: the static arguments, without a ring.
      most: the most segments of a row; 0 if nothing is known of them. See `AttentionMask`.
      *arrays: queries, keys and values of one device; queries and keys have the same segments.
    """
    if not (most and call.has_segments and platform_in_use() == "cuda"):
        return call
    # cuDNN takes two segments for packed ones, and one for a row as a whole.
    packed = msgspec.structs.replace(call, packed_segments=max(most, 2))
    shapes = [known_sizes(x.shape) for x in arrays]
    is_known = attention_cudnn.can(packed, shapes, arrays[0].dtype.name)
    is_known = is_known and attention_cudnn.can_pack(packed, shapes, device_kind_in_use())
    return packed if is_known else call


def attend(
    call: AttentionCall,
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    integers: Sequence[tf.Tensor] = (),
    learned: Sequence[tf.Tensor] = (),
    most_segments: int = 0,
) -> tf.Tensor:
    """Returns the attention output [B,N,L,D], with the D of the values, on one device.

    Consecutive heads of queries share a head of keys and values if these have fewer heads. The
    output of a query that no key is visible to is finite, and otherwise undefined.

    Args:
      query_BNLD: queries, already scaled.
      integers: int32 segments [B,L] of the queries and [B,K] of the keys, if the call has them,
        then the uint32 arrays of `DropoutOperands`, if the call drops weights.
      learned: float32 biases [N,buckets] of the logits and logits [N] of sinks, those that the call
        has.
      most_segments: the most segments of a row; 0 if nothing is known of them. See `AttentionMask`.
    """
    call = with_packed_segments(call, most_segments, query_BNLD, keys_BNKD, values_BNKD)

    @custom_gradient
    def compute(*operands: tf.Tensor) -> Any:
        mixed_BNLD, log_sums_BNL = attend_with_sums(call, operands)

        def gradient(d_mixed_BNLD: tf.Tensor) -> list[tf.Tensor | None]:
            found = gradients(call, operands, mixed_BNLD, log_sums_BNL, d_mixed_BNLD)
            return [*found[:3], *[None] * len(integers), *found[3:]]

        return mixed_BNLD, gradient

    return compute(query_BNLD, keys_BNKD, values_BNKD, *integers, *learned)


def attend_with_sums(
    call: AttentionCall, operands: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the attention output [B,N,L,D] and the float32 log of the softmax' sums [B,N,L].

    Neither has a gradient. The log of a query that no key is visible to is below -1e29. With
    packed segments the sums are as the kernel has them, and only `gradients` reads them.

    Args:
      operands: queries, keys, values, then the `integers` and `learned` of `attend`.
    """
    query_BNLD, keys_BNKD, values_BNKD = operands[:3]
    batch, heads, queries, _ = known_sizes(query_BNLD.shape)
    mixed = tf.TensorSpec([batch, heads, queries, values_BNKD.shape[-1]], query_BNLD.dtype)
    # Sums of packed segments are the kernel's own matter: it has a row of them for each segment.
    rows = batch * max(call.packed_segments, 1)
    log_sums = tf.TensorSpec([rows, heads, queries], tf.float32)
    share = computed_share(platform_in_use(), call, query_BNLD, keys_BNKD)
    mixed_BNLD, log_sums_BNL = FORWARD.mark(call, operands, [mixed, log_sums], share)
    return mixed_BNLD, log_sums_BNL


def gradients(
    call: AttentionCall,
    operands: Sequence[tf.Tensor],
    mixed_BNLD: tf.Tensor,
    log_sums_BNL: tf.Tensor,
    d_mixed_BNLD: tf.Tensor,
) -> list[tf.Tensor]:
    """Returns the gradients of queries, keys, values, and what is learned, as in `attend`.

    If the keys are a part of those that the queries attend to, and output and sums are of all keys,
    these are the gradients of this part, and terms of the queries' gradient.

    Args:
      operands: the operands of `attend_with_sums`.
      log_sums_BNL: float32, the log of the softmax' sums.
    """
    d_operands = [*operands[:3], *operands[len(operands) - call.learned :]]
    return BACKWARD.mark(
        call,
        [*operands, mixed_BNLD, log_sums_BNL, d_mixed_BNLD],
        [tf.TensorSpec(x.shape, x.dtype) for x in d_operands],
        computed_share(platform_in_use(), call, operands[0], operands[1], is_gradient=True),
    )


def computed_share(
    platform: str,
    call: AttentionCall,
    query_BNLD: tf.Tensor | tf.TensorSpec,
    keys_BNKD: tf.Tensor | tf.TensorSpec,
    is_gradient: bool = False,
) -> float:
    """Returns the share of the pairs of queries and keys that a platform's kernel computes."""
    query, keys = (known_sizes(x.shape) for x in (query_BNLD, keys_BNKD))
    module = _MODULES[hardware_of(platform)]
    return module.computed_share(call, query, keys, is_gradient, query_BNLD.dtype.size)
