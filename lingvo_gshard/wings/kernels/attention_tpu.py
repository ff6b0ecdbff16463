"""Attention on TPUs: jax's Splash attention, which skips blocks that a mask hides.

Source of the kernel: jax/experimental/pallas/ops/tpu/splash_attention in
https://github.com/jax-ml/jax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import splash, splash_masks
from lingvo_gshard.wings.kernels.call import AttentionCall, Operands, pad

# The number of lanes of a TPU's vector unit. Blocks are multiples of it.
_LANES = 128
# Blocks of this size fill the matrix unit, and fit into the vector memory with heads of 256.
_BLOCK = 512
# Keys of a block whose gradients one kernel computes: with heads of 128 in 16 bits they fit into
# the vector memory. The queries' gradient is written once for each block, so there are few.
_LARGEST_FUSED = 2048
_FUSED_BYTES = _LARGEST_FUSED * 128 * 2
_MOST_FUSED = 4
# The log of a sum over no key is less. No sum over keys is so small.
_NO_KEYS = -1e30


def obstacle(call: AttentionCall, query: tuple, keys: tuple, values: tuple, dtype: str) -> str:
    """Returns why Splash attention cannot compute a call of arrays [B,N,L,D]; "" if it can."""
    del values
    if call.dropout_rate:
        return "Splash attention cannot drop weights"
    if call.buckets is not None:
        return "Splash attention has no learned bias"
    if dtype not in ("bfloat16", "float32"):
        return f"Splash attention computes bfloat16 and float32, not {dtype}"
    if min(query[2], keys[2]) < _LANES:
        return f"rows of fewer than {_LANES} positions are faster without Splash attention"
    return ""


def computed_share(
    call: AttentionCall, query: Sequence[int], keys: Sequence[int], is_gradient: bool, width: int
) -> float:
    """Returns the share of blocks that Splash attention computes of arrays [B,N,L,D].

    `width` is the bytes of an element.
    """
    queries, count = _whole_blocks(query[2]), _whole_blocks(keys[2])
    fused = _fused_block(call, count, keys[3] * width) if is_gradient else 0
    return call.computed_share(queries, count, _block(queries), fused or _block(count))


def forward(call: AttentionCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the output [B,N,L,D] and the float32 log of the softmax' sums [B,N,L]."""
    rows = _whole_rows(call, operands)
    kernel = _kernel(call, rows, save_residuals=True, interpret=interpret)

    def attend_row(query: Any, keys: Any, values: Any, segments: Any) -> tuple:
        mixed, (log_sums,) = kernel(query, keys, values, segments, rows.sinks)
        return mixed, log_sums

    mixed, log_sums = jax.vmap(attend_row)(
        rows.query, rows.keys, rows.values, splash.SegmentIds(*rows.segments)
    )
    queries, keys = (x.shape[2] for x in operands[:2])
    if call.hides_all_keys(queries, keys):
        # Splash attention divides by a sum of zero where it skips all blocks of a query.
        mixed = jnp.where(log_sums[..., None] < _NO_KEYS, 0.0, mixed)
    return mixed[:, :, :queries].astype(operands[0].dtype), log_sums[:, :, :queries]


def backward(call: AttentionCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the gradients of queries, keys, values and sinks.

    After the operands of `forward` come its results, and the gradient of its output.
    """
    *inputs, mixed, log_sums, d_mixed = operands
    rows = _whole_rows(call, inputs)
    kernel = _kernel(call, rows, save_residuals=False, interpret=interpret)
    arguments = {name: kernel.kwargs[name] for name in _BACKWARD_ARGUMENTS}

    def differentiate_row(row: tuple) -> tuple:
        query, keys, values, segments, mixed, log_sums, d_mixed = row
        residuals = (query, keys, values, segments, rows.sinks, mixed, log_sums)
        masks = (kernel.dq_mask_info, kernel.dkv_mask_info)
        gradients = splash._splash_attention_bwd(**arguments, res=(*residuals, *masks), do=d_mixed)
        *_, d_query, d_keys, d_values, _, d_sinks = gradients
        return d_query, d_keys, d_values, d_sinks

    queries = rows.query.shape[2]
    results = (pad(x, 2, queries) for x in (mixed, log_sums, d_mixed))
    segments = splash.SegmentIds(*rows.segments)
    *d_arrays, d_sinks = jax.vmap(differentiate_row)(
        (rows.query, rows.keys, rows.values, segments, *results)
    )
    gradients = [
        d[:, :, : x.shape[2]].astype(x.dtype) for d, x in zip(d_arrays, inputs[:3], strict=True)
    ]
    if not call.has_sinks:
        return tuple(gradients)
    # Splash attention returns them in the type of the queries.
    return (*gradients, d_sinks.astype(inputs[-1].dtype).sum(0))


_BACKWARD_ARGUMENTS = (
    *("save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name"),
    *("mask_function", "attn_logits_soft_cap", "interpret"),
)


def _whole_rows(call: AttentionCall, arrays: Any) -> Operands:
    """Returns the operands of a call with rows of whole blocks, and with segments."""
    operands = Operands.of(call, arrays)
    batch, _, queries, _ = operands.query.shape
    keys = operands.keys.shape[2]
    if not operands.segments:
        ones = tuple(jnp.ones((batch, size), jnp.int32) for size in (queries, keys))
        operands = dataclasses.replace(operands, segments=ones)
    return operands.padded(_whole_blocks(queries), _whole_blocks(keys))


def _whole_blocks(length: int) -> int:
    """Returns the length that whole blocks have: a multiple of one block, or of one lane."""
    block = _BLOCK if length > 2 * _BLOCK else _LANES
    return -(-length // block) * block


@functools.lru_cache(maxsize=64)
def _mask(call: AttentionCall, heads: int, queries: int, keys: int) -> Any:
    shape = (queries, keys)
    if call.window:
        window = (call.window, 0 if call.is_causal else call.window)
        mask = splash_masks.LocalMask(shape, window, call.first_query)
    elif call.is_causal:
        mask = splash_masks.CausalMask(shape, call.first_query)
    else:
        mask = splash_masks.FullMask(shape)
    return splash_masks.MultiHeadMask([mask] * heads)


def _kernel(call: AttentionCall, rows: Operands, save_residuals: bool, interpret: bool) -> Any:
    _, heads, queries, _ = rows.query.shape
    keys = rows.keys.shape[2]
    block_q, block_kv = _block(queries), _block(keys)
    fused = _fused_block(call, keys, rows.keys.shape[3] * rows.keys.dtype.itemsize)
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=fused or block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=None if fused else block_q,
        block_kv_dq=None if fused else block_kv,
        use_fused_bwd_kernel=bool(fused),
    )
    return splash.make_splash_mha_single_device(
        _mask(call, heads, queries, keys),
        block_sizes=sizes,
        save_residuals=save_residuals,
        attn_logits_soft_cap=call.logit_cap or None,
        interpret=interpret,
    )


def _fused_block(call: AttentionCall, keys: int, bytes_of_key: int) -> int:
    """Returns the keys of a block whose gradients one kernel computes; 0 if it takes two kernels.

    One kernel computes five products for each block that is visible, where two compute seven. It
    visits hidden blocks as well, and a window has many. The keys fill whole blocks.
    """
    largest = min(_LARGEST_FUSED, _FUSED_BYTES // bytes_of_key)
    sizes = range(_block(keys), largest + 1, _block(keys))
    found = (size for size in sizes if keys % size == 0 and keys // size <= _MOST_FUSED)
    return 0 if call.window else next(found, 0)


def _block(size: int) -> int:
    """Returns the largest block that divides a length."""
    return next(block for block in (_BLOCK, 384, 256, _LANES) if size % block == 0)
