"""Attention on GPUs of NVIDIA: cuDNN's fused attention where it can, else our kernel in Pallas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import jax
from lingvo_gshard.wings.kernels import attention_cudnn, attention_triton
from lingvo_gshard.wings.kernels.call import AttentionCall

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


def computed_share(
    call: AttentionCall, query: Sequence[int], keys: Sequence[int], is_gradient: bool, width: int
) -> float:
    """Returns the share of tiles that the kernels compute. cuDNN's are taken to be as large.

    Arguments are as in attention_tpu.py.
    """
    del is_gradient, width
    return call.computed_share(query[2], keys[2], _TILE, _TILE)


def forward(call: AttentionCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the output and the log of the softmax' sums. Arguments are as in attention_tpu.py."""
    # cuDNN cannot compute on CPUs.
    if interpret or not _cudnn_can(call, operands):
        return attention_triton.forward(call, *operands, interpret=interpret)
    return attention_cudnn.forward(call, *operands)


def backward(call: AttentionCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the gradients of queries, keys, values, and what the call learns.

    Arguments are as in attention_tpu.py.
    """
    if interpret or not _cudnn_can(call, operands):
        return attention_triton.backward(call, *operands, interpret=interpret)
    return attention_cudnn.backward(call, *operands)


def _cudnn_can(call: AttentionCall, operands: Any) -> bool:
    return attention_cudnn.can(call, [x.shape for x in operands[:3]], operands[0].dtype.name)
