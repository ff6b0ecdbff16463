"""cuDNN's fused attention: of whole rows, and of the segments of packed rows one by one.

XLA's custom calls are made here, with the configuration that jax.nn.dot_product_attention gives
them, without asking which GPU this machine has: programs are compiled for devices that are
elsewhere, too.

cuDNN finds a segment by its offset in the array of all rows. The offsets are computed here:
jax 0.10 takes the stride of the queries for keys with fewer heads, and so reads keys of other
tokens (https://github.com/jax-ml/jax/pull/39521).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import cudnn_attention, ir
from lingvo_gshard.wings.kernels.call import AttentionCall

# cuDNN's largest head on Ampere; Hopper has 256.
_LARGEST_HEAD = 128
# GPUs whose cuDNN knows offsets of segments: compute capability 9.0 and later
# (https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html).
_KNOWS_SEGMENTS = re.compile(r"\b(g?h|gb|b)\d{2,3}\b", re.IGNORECASE)
# With a window, this cuDNN is wrong unless the mask is causal and nothing else
# (https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/common/fused_attn/fused_attn.cpp).
_WRONG_WINDOWS = 91400
# Bytes that a gradient's call may work in. More heads are divided over several calls.
_MOST_WORKSPACE = 2**31
# XLA passes offsets as int32.
_MOST_ELEMENTS = 2**31
_CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


def can(call: AttentionCall, shapes: Iterable[Sequence[int]], dtype: str) -> bool:
    """Returns whether cuDNN knows the mask, the sizes [B,N,L,D] and the NumPy type of a call."""
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


def can_pack(call: AttentionCall, shapes: Sequence[Sequence[int]], device_kind: str) -> bool:
    """Returns whether cuDNN packs segments of rows [B,N,L,D] of a call that it `can` compute."""
    if call.window and _version() == _WRONG_WINDOWS:
        return False
    query, keys, _ = shapes
    is_small = _workspace(call, query, keys) <= keys[1] * query[0] * _MOST_WORKSPACE
    is_small = is_small and math.prod(query[1:]) < _MOST_ELEMENTS
    return is_small and bool(_KNOWS_SEGMENTS.search(device_kind))


def _version() -> int:
    """Returns the version of this machine's cuDNN; 0 if it has none."""
    try:
        return cudnn_attention.check_cudnn_version()
    except RuntimeError:
        return 0


def forward(call: AttentionCall, *operands: jax.Array) -> tuple:
    """Returns the output [B,N,L,D] and the log of the softmax' sums; see `attention_cuda`.

    Args:
      call: the static arguments, which cuDNN `can` compute.
      *operands: queries, keys, values, and segments of queries and keys if the call has them.
    """
    query, keys, _ = operands[:3]
    rows, _ = _calls(call, query.shape, keys.shape)
    parts = zip(*(_split(x, 0, rows) for x in operands), strict=True)
    found = [_forward(call, part) for part in parts]
    return tuple(jnp.concatenate(each) for each in zip(*found, strict=True))


def backward(call: AttentionCall, *operands: jax.Array) -> tuple:
    """Returns the gradients of queries, keys and values.

    Args:
      *operands: the operands and results of `forward`, then the gradient of its output.
    """
    query, keys, _ = operands[:3]
    rows, heads = _calls(call, query.shape, keys.shape)
    gradients = []
    for part in zip(*(_split(x, 0, rows) for x in operands), strict=True):
        # Segments have no heads.
        by_heads = [_split(x, 1, heads) if x.ndim > 2 else [x] * heads for x in part]
        found = [_backward(call, each) for each in zip(*by_heads, strict=True)]
        gradients.append([jnp.concatenate(each, 1) for each in zip(*found, strict=True)])
    return tuple(jnp.concatenate(each) for each in zip(*gradients, strict=True))


def _calls(call: AttentionCall, query: Sequence[int], keys: Sequence[int]) -> tuple[int, int]:
    """Returns over how many calls rows are divided, and over how many gradients of heads are."""
    batch, shared = query[0], keys[1]
    workspace, elements = _workspace(call, query, keys), math.prod(query)
    rows = next(
        parts
        for parts in range(1, batch + 1)
        if batch % parts == 0
        and (parts == batch or workspace <= parts * shared * _MOST_WORKSPACE)
        and (parts == batch or elements < parts * _MOST_ELEMENTS)
    )
    heads = next(
        parts
        for parts in range(1, shared + 1)
        if shared % parts == 0 and (parts == shared or workspace <= rows * parts * _MOST_WORKSPACE)
    )
    return rows, heads


def _workspace(call: AttentionCall, query: Sequence[int], keys: Sequence[int]) -> int:
    """Returns the bytes that cuDNN works in for the gradients of all rows and heads.

    Each segment that a row may have takes as much as a whole row. cuDNN adds the queries' gradient
    in float32. If heads share keys and values, it keeps the gradients of each head in 16 bits; see
    https://github.com/NVIDIA/cudnn-frontend/blob/main/include/cudnn_frontend/node/scaled_dot_product_flash_attention.h
    """
    batch, heads, length, dim = query
    of_keys = 2 * 2 * keys[2] if keys[1] < heads else 0
    return max(call.packed_segments, 1) * batch * heads * dim * (4 * length + of_keys)


def _split(x: jax.Array, dimension: int, parts: int) -> list[jax.Array]:
    return jnp.split(x, parts, dimension) if parts > 1 else [x]


def _forward(call: AttentionCall, operands: Sequence[jax.Array]) -> tuple:
    query, keys, values = operands[:3]
    packed = _Packed(call, operands)
    batch, heads, length, _ = query.shape
    sums = [batch * max(call.packed_segments, 1), heads, length]
    arrays = [packed.rows(x) for x in (query, keys, values)]
    results = [query, jax.ShapeDtypeStruct(sums, jnp.float32)]
    output, sums_BNL = _compute(call, [*arrays, *packed.segments], results, query, keys, 0)
    return packed.output(output), sums_BNL


def _backward(call: AttentionCall, operands: Sequence[jax.Array]) -> tuple:
    *inputs, mixed, sums_BNL, d_mixed = operands
    query, keys, values = inputs[:3]
    packed = _Packed(call, inputs)
    *rows, of_output, d_output = [packed.rows(x) for x in (query, keys, values, mixed, d_mixed)]
    arrays = [*rows, sums_BNL, d_output, of_output, *packed.segments]
    workspace = _workspace(call, query.shape, keys.shape)
    gradients = _compute(call, arrays, [query, keys, values], query, keys, workspace)
    return tuple(packed.output(each) for each in gradients)


class _Packed:
    """The arrays of a call in its layout: packed segments are parts of [B,L,N,D].

    Attributes:
      segments: lengths and offsets of the segments of queries and of keys, if they are packed.
    """

    def __init__(self, call: AttentionCall, operands: Any):
        self._most = call.packed_segments
        self._segments_BL = operands[3] if self._most else None
        self.segments: list[jax.Array] = []
        if self._segments_BL is not None:
            lengths_BM, begins = _all_segments(self._segments_BL, self._most)
            # The elements of a token in an array [B,L,N,D].
            offsets = [begins * (x.shape[1] * x.shape[3]) for x in operands[:2]]
            self.segments = [lengths_BM, lengths_BM, *offsets]

    def rows(self, x_BNLD: jax.Array) -> jax.Array:
        """Returns an array in the layout of the call."""
        return x_BNLD if self._segments_BL is None else x_BNLD.transpose(0, 2, 1, 3)

    def output(self, x_BNLD: jax.Array) -> jax.Array:
        """Returns a result with 0 in padding and NaN in rows that are not known.

        cuDNN writes nothing in padding.
        """
        if self._segments_BL is None:
            return x_BNLD
        is_token_B1L1 = self._segments_BL[:, None, :, None] > 0
        known_B111 = _are_known(self._segments_BL, self._most)[:, None, None, None]
        x_BNLD = jnp.where(is_token_B1L1, x_BNLD, jnp.zeros_like(x_BNLD))
        return jnp.where(known_B111, x_BNLD, jnp.full_like(x_BNLD, jnp.nan))


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


def _compute(
    call: AttentionCall,
    arrays: Sequence[jax.Array],
    results: Sequence[Any],
    query: jax.Array,
    keys: jax.Array,
    workspace: int,
) -> Sequence[jax.Array]:
    """Returns the results of XLA's call of cuDNN.

    Args:
      arrays: the operands of XLA's call.
      results: what has the shapes and types of the results: arrays [B,N,L,D], or sums.
      query: the queries [B,N,L,D].
      keys: the keys [B,N,K,D].
      workspace: bytes that cuDNN works in; more than 0 for gradients. Plans count them. On a GPU,
        XLA asks cuDNN and puts its answer in their place.
    """
    is_gradient = workspace > 0
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
    # The dimensions of a result from the slowest to the fastest.
    layouts = [(0, 2, 1, 3) if call.packed_segments and x.ndim == 4 else None for x in shapes]
    compute = jax.ffi.ffi_call(
        _CALLS[is_gradient],
        [*shapes, jax.ShapeDtypeStruct([workspace], jnp.uint8)],
        output_layouts=[*layouts, None],
        custom_call_api_version=2,
        legacy_backend_config=_config(call, query, keys, is_gradient),
    )
    return compute(*arrays)[:-1]


def _config(call: AttentionCall, query: jax.Array, keys: jax.Array, is_gradient: bool) -> str:
    """Returns the configuration of XLA's call of cuDNN, as jax writes it."""
    kinds = cudnn_attention.MaskType
    mask = kinds.CAUSAL if call.is_causal else kinds.NO_MASK
    layout = cudnn_attention.AttentionLayout.BNTH
    if call.packed_segments:
        mask = kinds.PADDING_CAUSAL if call.is_causal else kinds.PADDING
        layout = cudnn_attention.AttentionLayout.BTNH
    batch, heads, length, _ = query.shape
    with ir.Context():
        dtype = ir.BF16Type.get() if query.dtype == jnp.bfloat16 else ir.F16Type.get()
        return cudnn_attention.create_dot_product_attention_backend_config(
            batch,
            heads,
            length,
            keys.shape[2],
            dtype,
            fmha_scale=1.0,
            seed=0,
            dropout_rate=0.0,
            mask_type=mask,
            layout=layout.value,
            # cuDNN counts the query's own position as part of the window.
            sliding_window_length=call.window + 1 if call.window else None,
            max_seg_per_batch=max(call.packed_segments, 1),
            is_paged_attention=False,
            is_bwd=is_gradient,
        )
