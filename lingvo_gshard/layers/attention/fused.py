"""Chooses the platform's fused kernel for an attention, and calls it on the shards of devices."""

from __future__ import annotations

from typing import cast

from lingvo_gshard import kernels
from lingvo_gshard.core import context
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.kernels.call import AttentionCall
from lingvo_gshard.kernels.kernel import platform_in_use
from lingvo_gshard.layers.attention.kernel import Softmax, repeat_heads
from lingvo_gshard.layers.attention.mask import AttentionMask
from lingvo_gshard.sharding.manual import manual, mesh_in_use, resolve
from lingvo_gshard.sharding.partitioning import even
from lingvo_gshard.sharding.strategies import Split


def attend_fused(
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    mask: AttentionMask,
    softmax: Softmax,
) -> tf.Tensor | None:
    """Returns the attention output [B,N,L,D] of the platform's kernel; None if it has none.

    Which kernel a layer uses, or why none, is recorded: see `kernels.kernel.recording`.

    Args:
      query_BNLD: queries, already scaled.
      keys_BNKD: keys, maybe with fewer heads.
      values_BNKD: values, with as many heads as the keys.
      mask: the keys that each query attends to.
      softmax: options of the softmax.
    """
    platform = platform_in_use()
    if not platform:
        return None
    splits = _splits(query_BNLD, keys_BNKD)
    obstacle, call = _obstacle(mask, softmax, splits), None
    if not obstacle:
        call = _call(mask, softmax)
        obstacle = kernels.attention.obstacle(platform, call, query_BNLD, keys_BNKD, values_BNKD)
    kernels.kernel.note(context.layer_path(), "attention", obstacle)
    if obstacle or call is None:
        return None
    sinks_N = softmax.sinks_N
    return _attend_on_shards(call, splits, query_BNLD, keys_BNKD, values_BNKD, mask, sinks_N)


def _call(mask: AttentionMask, softmax: Softmax) -> AttentionCall:
    assert isinstance(mask.first_query, int)
    return AttentionCall(
        is_causal=mask.is_causal,
        window=mask.window,
        first_query=mask.first_query,
        logit_cap=softmax.cap,
        has_segments=mask.segments_BL is not None,
        has_sinks=softmax.sinks_N is not None,
    )


def _obstacle(mask: AttentionMask, softmax: Softmax, splits: tuple[Split, Split]) -> str:
    if softmax.relative_bias_NLK is not None or mask.learned_bias_NLK is not None:
        return "it has a learned bias"
    if softmax.dropout_BNLK is not None:
        return "its weights are dropped"
    if not isinstance(mask.first_query, int):
        return "the position of the first query is known only when the step runs"
    if splits[0][2]:
        return "L is split over devices; choose RingKernel"
    return ""


def _splits(query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor) -> tuple[Split, Split]:
    """Returns the mesh axes that split queries and keys. Parts are equal in a manual region."""
    if mesh_in_use() is None:
        return ((),) * 4, ((),) * 4
    mesh = mesh_in_use()
    assert mesh is not None
    sizes = known_sizes(query_BNLD.shape)
    found = resolve("BNLD", 4)
    batch, heads = (even(sizes[i], found[i], mesh) for i in (0, 1))
    length = tuple(axis for axis in found[2] if mesh.parts([axis]) > 1)
    shared = heads if known_sizes(keys_BNKD.shape)[1] % mesh.parts(heads) == 0 else ()
    return (batch, heads, length, ()), (batch, shared, (), ())


def _attend_on_shards(
    call: AttentionCall,
    splits: tuple[Split, Split],
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    mask: AttentionMask,
    sinks_N: tf.Tensor | None,
) -> tf.Tensor:
    of_queries, of_keys = splits
    if of_keys[1] != of_queries[1]:
        # Each device needs the heads of keys of its own heads of queries.
        heads = known_sizes(query_BNLD.shape)[1]
        keys_BNKD, values_BNKD = (repeat_heads(x, heads) for x in (keys_BNKD, values_BNKD))
        of_keys = of_queries
    segments = [] if mask.segments_BL is None else [mask.segments_BL, mask.key_segments()]
    sinks = [] if sinks_N is None else [sinks_N]

    def attend(*shards: tf.Tensor) -> tf.Tensor:
        query, keys, values, *others = shards
        count = len(segments)
        return kernels.attention.attend(call, query, keys, values, others[:count], others[count:])

    region = manual(
        attend,
        [
            of_queries,
            of_keys,
            of_keys,
            *[(of_queries[0], ())] * len(segments),
            *[(of_queries[1],)] * len(sinks),
        ],
        of_queries,
    )
    return cast(tf.Tensor, region(query_BNLD, keys_BNKD, values_BNKD, *segments, *sinks))
