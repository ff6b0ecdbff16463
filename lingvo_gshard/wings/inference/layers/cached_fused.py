"""Chooses a kernel of the hardware for the attention of new tokens, and calls it on the shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from lingvo_gshard.core import NestedMap, context, kernel_use, known_sizes, tf
from lingvo_gshard.layers import SoftmaxOptions, heads_first
from lingvo_gshard.sharding import even, manual, mesh_in_use, platform_in_use, resolve
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.inference.layers.cached import Ring, Visible
from lingvo_gshard.wings.kernels.cache_call import CacheCall
from lingvo_gshard.wings.kernels.layers.fused_attention import attend_fused

# The name of the kernel in lists of what layers use.
_NAME = "attention over the cache"


def attend_slots(
    query_BLND: tf.Tensor, slots: NestedMap, visible: Visible, softmax: SoftmaxOptions
) -> tf.Tensor | None:
    """Returns the output of `cached.attend` by the platform's kernel; None if it has none.

    Which kernel a layer uses, or why none, is recorded: see `kernel_use.recording`.
    """
    platform = platform_in_use()
    if not platform:
        return None
    if visible.mask is not None:
        mixed_BNLD = attend_fused(
            heads_first(query_BLND, "BNLD"), slots.key[0], slots.value[0], visible.mask, softmax
        )
        return None if mixed_BNLD is None else heads_first(mixed_BNLD, "BLND")
    ring = visible.ring
    obstacle = ""
    if ring is None:
        obstacle = "its tokens see the slots of a beam or of a memory"
    elif softmax.relative_bias is not None:
        obstacle = "it has a learned bias"
    elif len(slots.key) > 1:
        obstacle = "its slots are in several blocks"
    if obstacle or ring is None:
        kernel_use.note(context.layer_path(), _NAME, obstacle)
        return None
    call = CacheCall(
        logit_cap=softmax.cap,
        has_sinks=softmax.sinks_N is not None,
        has_values=slots.value[0] is not slots.key[0],
        window=ring.window,
    )
    query_BND = query_BLND[:, 0]
    arrays = [slots.key[0], *([slots.value[0]] if call.has_values else [])]
    obstacle = kernels.cache_attention.obstacle(
        platform, call, query_BND, *(_shard(x) for x in (arrays[0], arrays[-1]))
    )
    kernel_use.note(context.layer_path(), _NAME, obstacle)
    if obstacle:
        return None
    return _attend_on_shards(call, query_BND, arrays, ring, softmax.sinks_N)[:, None]


def _axes(x: tf.Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the mesh axes that split rows and heads, of an array [B,N,...], into equal parts."""
    mesh = mesh_in_use()
    if mesh is None:
        return (), ()
    sizes, found = known_sizes(x.shape), resolve("BNKD", 4)
    return even(sizes[0], found[0], mesh), even(sizes[1], found[1], mesh)


def _shard(x_BNKD: tf.Tensor) -> tf.TensorSpec:
    """Returns the shape and the type of the part of a cache that one device has."""
    sizes, mesh = known_sizes(x_BNKD.shape), mesh_in_use()
    if mesh is not None:
        for dimension, axes in enumerate(_axes(x_BNKD)):
            sizes[dimension] //= mesh.parts(axes)
    return tf.TensorSpec(sizes, x_BNKD.dtype)


def _attend_on_shards(
    call: CacheCall,
    query_BND: tf.Tensor,
    arrays: Sequence[tf.Tensor],
    ring: Ring,
    sinks_N: tf.Tensor | None,
) -> tf.Tensor:
    """Returns the attention output [B,N,D] of each device's rows and heads.

    Devices that cannot split the heads of the keys have the whole cache of their rows, and compute
    all heads of the queries with it. If the keys have a single head, the queries stay split.
    """
    rows, heads = _axes(arrays[0])
    is_shared_by_all = known_sizes(arrays[0].shape)[1] == 1
    query_heads = _axes(query_BND)[1] if is_shared_by_all else heads
    sinks = [] if sinks_N is None else [sinks_N]

    def attend(query_BND: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
        keys_BNKD, *rest = others
        values_BNKD = rest.pop(0) if call.has_values else keys_BNKD
        newest, reach_B, *shards = rest
        return kernels.cache_attention.attend(
            call, query_BND, keys_BNKD, values_BNKD, newest, reach_B, shards
        )

    of_cache, of_query = (rows, heads, (), ()), (rows, query_heads, ())
    splits = [of_query, *[of_cache] * len(arrays), (), (rows,), *[(query_heads,)] * len(sinks)]
    region = manual(attend, splits, of_query)
    return cast(tf.Tensor, region(query_BND, *arrays, ring.newest, ring.reach_B, *sinks))
