"""Attention of one new token of each row to a ring of slots, reading the visible slots only."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core import known_sizes, tf
from lingvo_gshard.sharding import hardware_of, platform_in_use
from lingvo_gshard.wings.kernels import cache_tpu, cache_triton
from lingvo_gshard.wings.kernels.cache_call import CacheCall
from lingvo_gshard.wings.kernels.kernel import register

_MODULES = {"tpu": cache_tpu, "cuda": cache_triton}

FORWARD = register("cache_attention", CacheCall, tpu=cache_tpu.forward, cuda=cache_triton.forward)


def obstacle(
    platform: str,
    call: CacheCall,
    query_BND: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
) -> str:
    """Returns why a platform's kernel cannot compute attention to a cache; "" if it can."""
    shapes = [tuple(known_sizes(x.shape)) for x in (query_BND, keys_BNKD, values_BNKD)]
    query, keys, values = shapes
    module = _MODULES[hardware_of(platform)]
    return module.obstacle(call, query, keys, values, query_BND.dtype.name)


def attend(
    call: CacheCall,
    query_BND: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    newest: tf.Tensor,
    reach_B: tf.Tensor,
    sinks: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Returns the attention output [B,N,D], with the D of the values, on one device.

    A token sees its own slot and the `reach` slots before it, around the end of the ring. The
    output of a row that sees no slot is 0 without sinks. Consecutive heads of queries share a head
    of keys and values if these have fewer heads. There is no gradient.

    Args:
      query_BND: queries, already scaled.
      values_BNKD: values; not read if the keys are the values.
      newest: int32 scalar, the slot of the new tokens.
      reach_B: int32, less than K; -1 for rows that see no slot.
      sinks: float32 logits [N], if the call has them.
    """
    batch, heads, _ = known_sizes(query_BND.shape)
    keys, values = (tuple(known_sizes(x.shape)) for x in (keys_BNKD, values_BNKD))
    dtype = keys_BNKD.dtype.name
    block = _MODULES[hardware_of(platform_in_use())].block_size(call, keys, values, dtype)
    operands = [
        query_BND,
        keys_BNKD,
        *([values_BNKD] if call.has_values else []),
        tf.reshape(newest, [1]),
        reach_B,
        *sinks,
    ]
    mixed = tf.TensorSpec([batch, heads, values[3]], query_BND.dtype)
    (mixed_BND,) = FORWARD.mark(call, operands, [mixed], call.read_share(keys[2], block))
    return mixed_BND
