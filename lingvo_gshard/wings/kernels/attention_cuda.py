"""Attention on GPUs of NVIDIA: cuDNN's fused attention where it can, else our kernel in Pallas.

cuDNN is called as jax.nn.dot_product_attention calls it, by jax's primitives, without asking which
GPU this machine has: programs are compiled for devices that are elsewhere, too.
"""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.lazy import cudnn_attention, jax, jnp
from lingvo_gshard.wings.kernels import attention_triton
from lingvo_gshard.wings.kernels.call import AttentionCall

# cuDNN's largest head on Ampere; Hopper has 256.
_LARGEST_CUDNN_HEAD = 128
_LARGEST_HEAD = 256
# Rows that one tile of our kernel covers: XLA fuses so small a softmax as well.
_LEAST_ROWS = 128
# The queries and keys of a tile whose work is counted: a common size of such kernels.
_TILE = 64


def obstacle(call: AttentionCall, query: tuple, keys: tuple, values: tuple, dtype: str) -> str:
    """Returns why no kernel can compute a call; "" if one can. See attention_tpu.py."""
    del call
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"fused attention computes 16-bit floats and float32, not {dtype}"
    if max(query[3], values[3]) > _LARGEST_HEAD:
        return f"fused attention has heads of at most {_LARGEST_HEAD}, not {query[3]}"
    if min(query[2], keys[2]) < _LEAST_ROWS:
        return f"rows of fewer than {_LEAST_ROWS} positions are as fast without a kernel"
    return ""


def computed_share(call: AttentionCall, queries: int, keys: int) -> float:
    """Returns the share of tiles that the kernels compute. cuDNN's are taken to be as large."""
    return call.computed_share(queries, keys, _TILE, _TILE)


def forward(call: AttentionCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the output and the log of the softmax' sums. Arguments are as in attention_tpu.py."""
    # cuDNN cannot compute on CPUs.
    if interpret or not _cudnn_can(call, operands):
        return attention_triton.forward(call, *operands, interpret=interpret)
    unused = _unused(operands)
    return tuple(
        cudnn_attention._dot_product_attention_fwd_p.bind(
            *operands, *unused, is_training=True, **_cudnn_arguments(call)
        )
    )


def backward(call: AttentionCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the gradients of queries, keys, values, and what the call learns.

    Arguments are as in attention_tpu.py.
    """
    *inputs, mixed_BNLD, log_sums_BNL, d_mixed_BNLD = operands
    if interpret or not _cudnn_can(call, inputs):
        return attention_triton.backward(call, *operands, interpret=interpret)
    residuals = (log_sums_BNL, mixed_BNLD, d_mixed_BNLD)
    return tuple(
        cudnn_attention._dot_product_attention_bwd_p.bind(
            *inputs, *_unused(inputs), *residuals, **_cudnn_arguments(call)
        )
    )


def _cudnn_can(call: AttentionCall, operands: Any) -> bool:
    """Returns whether cuDNN knows the mask, the sizes and the type of a call."""
    query, keys, values = operands[:3]
    is_plain = not (call.has_segments or call.has_sinks or call.logit_cap or call.first_query)
    # cuDNN drops weights by random numbers of its own, and reads a bias of each query and key.
    is_plain = is_plain and not call.dropout_rate and call.buckets is None
    is_known_mask = not call.window or call.is_causal
    if call.is_causal and query.shape[2] != keys.shape[2]:
        is_known_mask = False
    dim = query.shape[3]
    is_known_head = dim == values.shape[3] and dim <= _LARGEST_CUDNN_HEAD and dim % 8 == 0
    is_16_bit = query.dtype in (jnp.bfloat16, jnp.float16)
    return is_plain and is_known_mask and is_known_head and is_16_bit


def _unused(operands: Any) -> list[jax.Array]:
    """Returns the empty arrays that stand for bias, lengths, offsets and pages."""
    return [jnp.zeros(0, operands[0].dtype)] * 7


def _cudnn_arguments(call: AttentionCall) -> dict[str, Any]:
    kinds = cudnn_attention.MaskType
    return {
        "scale": 1.0,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": kinds.CAUSAL if call.is_causal else kinds.NO_MASK,
        "layout": cudnn_attention.AttentionLayout.BNTH.value,
        # cuDNN counts the query's own position as part of the window.
        "sliding_window_length": call.window + 1 if call.window else None,
    }
