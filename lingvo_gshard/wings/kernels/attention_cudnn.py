"""cuDNN's fused attention: of whole rows, and of the segments of packed rows one by one.

It is called by jax's primitives, as jax.nn.dot_product_attention calls it, without asking which GPU
this machine has: programs are compiled for devices that are elsewhere, too.

cuDNN finds a segment by its offset in the array of all rows. The offsets are computed here:
jax 0.10 takes the stride of the queries for keys with fewer heads, and so reads keys of other
tokens (https://github.com/jax-ml/jax/pull/39521).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from lingvo_gshard.core.lazy import cudnn_attention, jax, jnp
from lingvo_gshard.wings.kernels.call import AttentionCall

# cuDNN's largest head on Ampere; Hopper has 256.
_LARGEST_HEAD = 128
# GPUs whose cuDNN knows offsets of segments: compute capability 9.0 and later
# (https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html).
_KNOWS_SEGMENTS = re.compile(r"\b(g?h|gb|b)\d{2,3}\b", re.IGNORECASE)


def can(call: AttentionCall, shapes: Iterable[Sequence[int]], dtype: str) -> bool:
    """Returns whether cuDNN knows the mask, the sizes and the type of a call.

    Args:
      call: the static arguments.
      shapes: shapes [B,N,L,D] of queries, keys and values.
      dtype: their type, by its name in NumPy.
    """
    query, keys, values = shapes
    is_plain = not (call.has_sinks or call.logit_cap or call.first_query)
    # cuDNN drops weights by random numbers of its own, and reads a bias of each query and key.
    is_plain = is_plain and not call.dropout_rate and call.buckets is None
    is_known_mask = not call.window or call.is_causal
    if call.is_causal and query[2] != keys[2]:
        is_known_mask = False
    if call.has_segments and not call.packed_segments:
        is_known_mask = False
    is_known_head = query[3] == values[3] and query[3] <= _LARGEST_HEAD and query[3] % 8 == 0
    return is_plain and is_known_mask and is_known_head and dtype in ("bfloat16", "float16")


def knows_segments(call: AttentionCall, device_kind: str) -> bool:
    """Returns whether cuDNN computes the segments of packed rows one by one on a device.

    Args:
      call: the static arguments, whose rows have segments.
      device_kind: jax's name of the device.
    """
    return not call.window and bool(_KNOWS_SEGMENTS.search(device_kind))


def forward(call: AttentionCall, *operands: jax.Array) -> tuple:
    """Returns the output [B,N,L,D] and the log of the softmax' sums; see `attention_cuda`.

    Args:
      call: the static arguments, which cuDNN `can` compute.
      *operands: queries, keys, values, and segments of queries and keys if the call has them.
    """
    compute = cudnn_attention._dot_product_attention_fwd_p.bind
    packed = _Packed(call, operands)
    output, sums = compute(*packed.arrays, is_training=True, **packed.arguments)
    return packed.output(output), sums


def backward(call: AttentionCall, *operands: jax.Array) -> tuple:
    """Returns the gradients of queries, keys and values.

    Args:
      call: as in `forward`.
      *operands: the operands and results of `forward`, then the gradient of its output.
    """
    *inputs, mixed, sums, d_mixed = operands
    compute = cudnn_attention._dot_product_attention_bwd_p.bind
    packed = _Packed(call, inputs)
    residuals = (sums, packed.rows(mixed), packed.rows(d_mixed))
    gradients = compute(*packed.arrays, *residuals, **packed.arguments)
    return tuple(packed.output(each) for each in gradients)


class _Packed:
    """The arrays and arguments of a call as jax's primitives take them.

    Attributes:
      arrays: queries, keys, values, the bias, lengths and offsets of segments, and pages; arrays
        without elements stand for what the call lacks.
      arguments: the static arguments.
    """

    def __init__(self, call: AttentionCall, operands: Any):
        query, keys, values = operands[:3]
        unused = jnp.zeros(0, query.dtype)
        self._segments = operands[3] if call.packed_segments else None
        self._most = call.packed_segments
        lengths = offsets = (unused, unused)
        if self._segments is not None:
            lengths_BM, begins = _all_segments(self._segments, self._most)
            lengths = (lengths_BM, lengths_BM)
            # The elements of a token in an array [B,L,N,D].
            offsets = tuple(begins * (x.shape[1] * x.shape[3]) for x in (query, keys))
        rows = [self.rows(x) for x in (query, keys, values)]
        self.arrays = (*rows, unused, *lengths, *offsets, unused, unused)
        self.arguments = _arguments(call)

    def rows(self, x_BNLD: jax.Array) -> jax.Array:
        """Returns an array in the layout of the call: packed segments are parts of [B,L,N,D]."""
        return x_BNLD if self._segments is None else x_BNLD.transpose(0, 2, 1, 3)

    def output(self, x: jax.Array) -> jax.Array:
        """Returns a result as [B,N,L,D], which is 0 in padding and NaN in rows that are not known.

        cuDNN writes nothing in padding.
        """
        if self._segments is None:
            return x
        segments_BL11 = self._segments[:, :, None, None]
        known_B111 = _are_known(self._segments, self._most)[:, None, None, None]
        x_BLND = jnp.where(segments_BL11 > 0, x, jnp.zeros_like(x))
        return jnp.where(known_B111, x_BLND, jnp.full_like(x, jnp.nan)).transpose(0, 2, 1, 3)


def _all_segments(segments_BL: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Returns the lengths [B,M] and the first tokens [B,M+1] of the segments of all rows.

    Both list the segments row after row. Elements after the last segment have a length of 0 and
    begin after the last token.

    Args:
      segments_BL: int32 segments, which are `_are_known`.
      most: M, the most segments of a row.
    """
    rows, length = segments_BL.shape
    numbers_M = jnp.arange(1, most + 1, dtype=jnp.int32)
    is_of_BML = segments_BL[:, None, :] == numbers_M[None, :, None]
    lengths_BM = is_of_BML.sum(-1, dtype=jnp.int32)
    first_of_row_B1 = jnp.arange(rows, dtype=jnp.int32)[:, None] * length
    begins_BM = first_of_row_B1 + jnp.cumsum(lengths_BM, 1, dtype=jnp.int32) - lengths_BM
    order = jnp.argsort(lengths_BM.reshape(-1) == 0, stable=True)
    lengths = lengths_BM.reshape(-1)[order]
    begins = jnp.where(lengths > 0, begins_BM.reshape(-1)[order], rows * length)
    begins = jnp.concatenate([begins, jnp.full([rows], rows * length, jnp.int32)])
    return lengths.reshape(rows, most), begins.reshape(rows, most + 1)


def _are_known(segments_BL: jax.Array, most: int) -> jax.Array:
    """Returns [B]: whether the segments of a row are 1, 2, ... up to `most`, and then padding."""
    before_BL = jnp.pad(segments_BL, [(0, 0), (1, 0)])[:, :-1]
    is_first_L = jnp.arange(segments_BL.shape[1]) == 0
    goes_on_BL = (segments_BL == before_BL) | (segments_BL == before_BL + 1)
    goes_on_BL &= is_first_L | (before_BL > 0)
    return jnp.all(((segments_BL == 0) | goes_on_BL) & (segments_BL <= most), 1)


def _arguments(call: AttentionCall) -> dict[str, Any]:
    kinds = cudnn_attention.MaskType
    mask = kinds.CAUSAL if call.is_causal else kinds.NO_MASK
    layout = cudnn_attention.AttentionLayout.BNTH
    if call.packed_segments:
        mask = kinds.PADDING_CAUSAL if call.is_causal else kinds.PADDING
        layout = cudnn_attention.AttentionLayout.BTNH
    return {
        "scale": 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
        "layout": layout.value,
        # cuDNN counts the query's own position as part of the window.
        "sliding_window_length": call.window + 1 if call.window else None,
    }
