"""Chooses the platform's fused kernel for an attention, and calls it on the shards of devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

from lingvo_gshard.core import context, kernel_use, known_sizes, tf
from lingvo_gshard.layers import (
    FUSED_ATTENTION,
    AttentionMask,
    SoftmaxOptions,
    repeat_heads,
    weights_shape,
)
from lingvo_gshard.sharding import (
    Split,
    even,
    hardware_of,
    manual,
    mesh_in_use,
    platform_in_use,
    resolve,
)
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.kernels.call import AttentionCall
from lingvo_gshard.wings.kernels.layers.fused_ring import FusedRing

LOCAL_LETTERS = {"b": "buckets of distances"}


def attend_fused(
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    mask: AttentionMask,
    softmax: SoftmaxOptions,
    balances_ring: bool | None = None,
) -> tf.Tensor | None:
    """Returns the attention output [B,N,L,D] of the platform's kernel; None if it has none.

    Which kernel a layer uses, or why none, is recorded: see `kernel_use.recording`.

    Args:
      query_BNLD: queries, already scaled.
      keys_BNKD: keys, maybe with fewer heads.
      values_BNKD: values, with as many heads as the keys.
      balances_ring: whether each device has an early and a late part of a causal row, if keys pass
        around the devices that split positions; None for layers without a ring.
    """
    platform = platform_in_use()
    if not platform:
        return None
    splits, made = _splits(query_BNLD, keys_BNKD), None
    obstacle, call = _obstacle(mask), _call(mask, softmax)
    if splits[0][2] and not obstacle:
        obstacle = _ring_obstacle(call, splits[0][2], query_BNLD, keys_BNKD)
        if balances_ring is None:
            obstacle = "L is split over devices; choose RingKernel or UlyssesKernel"
        elif not obstacle:
            made = _ring(call, splits[0][2], query_BNLD, balances_ring)
    if not obstacle:
        pieces = 1 if made is None else made.devices * (2 if made.is_balanced else 1)
        read = [_piece(x, pieces) for x in (query_BNLD, keys_BNKD, values_BNKD)]
        obstacle = kernels.attention.obstacle(platform, call, *read)
    arrays = (query_BNLD, keys_BNKD, values_BNKD)
    advice = "" if obstacle or made is not None else _advice(call, mask, arrays)
    kernel_use.note(context.layer_path(), "attention", obstacle, advice)
    if obstacle:
        return None
    attend: Callable[..., tf.Tensor] = functools.partial(
        kernels.attention.attend, call, most_segments=mask.most_segments
    )
    attend = attend if made is None else made.attend
    return _attend_on_shards(attend, splits, *arrays, mask, softmax)


def _advice(call: AttentionCall, mask: AttentionMask, arrays: tuple[tf.Tensor, ...]) -> str:
    """Returns what to set so that a faster kernel computes the segments of packed rows."""
    is_packed = mask.segments_BL is not None and mask.key_segments_BK is None and not mask.chunk
    if not is_packed or mask.most_segments:
        return ""
    if kernels.attention.with_packed_segments(call, 2, *arrays) == call:
        return ""
    return "input.most_segments would let cuDNN compute it, at about twice the rate"


class PlatformAttention:
    """The attention of the platform in use; see `layers.attention.kernel.FusedAttention`."""

    attend = staticmethod(attend_fused)

    def reads_bias_tables(self) -> bool:
        """Returns whether the platform has a kernel that computes with tables of biases."""
        return hardware_of(platform_in_use()) == "cuda"


FUSED_ATTENTION.register("kernels")(PlatformAttention())


def _ring(
    call: AttentionCall, axes: tuple[str, ...], query_BNLD: tf.Tensor, is_balanced: bool
) -> FusedRing:
    mesh = mesh_in_use()
    assert mesh is not None
    devices = mesh.parts(axes)
    length = known_sizes(query_BNLD.shape)[2] // devices
    is_balanced = is_balanced and call.is_causal and not call.window and length % 2 == 0
    return FusedRing(call, axes[0], devices, length, is_balanced)


def _ring_obstacle(
    call: AttentionCall, axes: tuple[str, ...], query_BNLD: tf.Tensor, keys_BNKD: tf.Tensor
) -> str:
    if call.buckets is not None:
        return "it has a learned bias"
    if len(axes) > 1:
        return f"the axes {' and '.join(axes)} split L, and the kernel's ring has one axis"
    has_distances = call.is_causal or call.window
    if call.first_query or (has_distances and query_BNLD.shape[2] != keys_BNKD.shape[2]):
        return "its queries and keys have other positions"
    return ""


def _piece(x_BNLD: tf.Tensor, pieces: int) -> tf.TensorSpec:
    """Returns the spec of the positions of a tensor that one call of the kernel reads."""
    batch, heads, length, dim = known_sizes(x_BNLD.shape)
    return tf.TensorSpec([batch, heads, length // pieces, dim], x_BNLD.dtype)


def _call(mask: AttentionMask, softmax: SoftmaxOptions) -> AttentionCall:
    first_query = mask.first_query
    return AttentionCall(
        is_causal=mask.is_causal,
        window=mask.window,
        first_query=first_query if isinstance(first_query, int) else 0,
        logit_cap=softmax.cap,
        has_segments=mask.segments_BL is not None,
        buckets=None if softmax.relative_bias is None else softmax.relative_bias.buckets,
        has_sinks=softmax.sinks_N is not None,
        dropout_rate=0.0 if softmax.dropout is None else softmax.dropout.rate,
    )


def _obstacle(mask: AttentionMask) -> str:
    if not isinstance(mask.first_query, int):
        return "the position of the first query is known only when the step runs"
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
    return (batch, heads, length, ()), (batch, shared, length, ())


def _attend_on_shards(
    attend: Callable[..., tf.Tensor],
    splits: tuple[Split, Split],
    query_BNLD: tf.Tensor,
    keys_BNKD: tf.Tensor,
    values_BNKD: tf.Tensor,
    mask: AttentionMask,
    softmax: SoftmaxOptions,
) -> tf.Tensor:
    of_queries, of_keys = splits
    if of_keys[1] != of_queries[1]:
        # Each device needs the heads of keys of its own heads of queries.
        heads = known_sizes(query_BNLD.shape)[1]
        keys_BNKD, values_BNKD = (repeat_heads(x, heads) for x in (keys_BNKD, values_BNKD))
        of_keys = of_queries
    integers, of_integers = _integers(mask, softmax, weights_shape(query_BNLD, keys_BNKD), splits)
    learned, of_learned = _learned(softmax, of_queries[1])

    def attend_shards(*shards: tf.Tensor) -> tf.Tensor:
        query, keys, values, *others = shards
        count = len(integers)
        return attend(query, keys, values, others[:count], others[count:])

    region = manual(
        attend_shards, [of_queries, of_keys, of_keys, *of_integers, *of_learned], of_queries
    )
    return cast(tf.Tensor, region(query_BNLD, keys_BNKD, values_BNKD, *integers, *learned))


def _learned(
    softmax: SoftmaxOptions, heads: tuple[str, ...]
) -> tuple[list[tf.Tensor], list[Split]]:
    """Returns the arrays `learned` of `kernels.attention.attend`, and the split of each."""
    arrays: list[tf.Tensor] = []
    splits: list[Split] = []
    if softmax.relative_bias is not None:
        table_Nb = tf.transpose(softmax.relative_bias.table_bN)
        arrays, splits = [tf.cast(table_Nb, tf.float32)], [(heads, ())]
    if softmax.sinks_N is not None:
        arrays, splits = [*arrays, softmax.sinks_N], [*splits, (heads,)]
    return arrays, splits


def _integers(
    mask: AttentionMask, softmax: SoftmaxOptions, shape_BNLK: list[int], splits: tuple[Split, Split]
) -> tuple[list[tf.Tensor], list[Split]]:
    """Returns the `integers` of `kernels.attention.attend`, and how each is split."""
    (batch, heads, queries, _), (_, _, keys, _) = splits
    arrays, found = [], []
    if mask.segments_BL is not None:
        arrays, found = [mask.segments_BL, mask.key_segments()], [(batch, queries), (batch, keys)]
    if softmax.dropout is not None:
        arrays += softmax.dropout.index_terms(shape_BNLK)
        arrays.append(tf.bitcast(softmax.dropout.key, tf.uint32))
        found += [(axes,) for axes in (batch, heads, queries, keys, ())]
    return arrays, found
