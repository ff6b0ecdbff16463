"""Products of factors of 8 or 4 bits with a scale for each block of numbers along the sum.

These are MXFP8 of the Open Compute Project (Rouhani et al. 2023, arXiv 2310.10537), and NVFP4 of
NVIDIA (2025, arXiv 2509.25149). XLA for GPUs leaves such products to cuDNN, which multiplies them
by the tensor cores of Blackwell. On older GPUs XLA multiplies the factors in 16 bits.
"""

from __future__ import annotations

import json

import msgspec

from lingvo_gshard.core import jax, jnp, known_sizes, tf
from lingvo_gshard.sharding import hardware_of, platform_in_use
from lingvo_gshard.wings.kernels.kernel import register

# Name of the kernel in plans and logs.
NAME = "products of blocks"
# XLA's name of the operation, as in jax.nn.scaled_matmul, and of types of its results.
_TARGET = "__op$block_scaled_dot"
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# The type of the factors -> the type of their scales.
_SCALES = {"float8_e4m3fn": "float8_e8m0fnu", "float4_e2m1fn": "float8_e4m3fn"}


class BlockCall(msgspec.Struct, frozen=True):
    """The static arguments of a product of blocks.

    Attributes:
      dtype: the type of 8 or 4 bits that has all values of the factors.
    """

    dtype: str


def _forward(
    call: BlockCall,
    left_GMK: jax.Array,
    right_GNK: jax.Array,
    left_scales: jax.Array,
    right_scales: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Returns the products [G,M,N], in the type of the factors; see `product`."""
    dtype, factors = left_GMK.dtype, (left_GMK, right_GNK)
    if interpret:
        wide = [
            (values.astype(call.dtype).astype(jnp.float32)).reshape(*scales.shape, -1)
            * scales[..., None]
            for values, scales in zip(factors, (left_scales, right_scales), strict=True)
        ]
        first, second = (factor.reshape(*factor.shape[:2], -1) for factor in wide)
        return (jnp.matmul(first, second.swapaxes(1, 2)).astype(dtype),)
    config = {
        "lhs_batch_dimensions": [0],
        "rhs_batch_dimensions": [0],
        "dequantize_type": _TYPES[dtype.name],
    }
    product = jax.ffi.ffi_call(
        _TARGET,
        jax.ShapeDtypeStruct((*left_GMK.shape[:2], right_GNK.shape[1]), dtype),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"scaled_dot_backend_config": config}),
    )
    narrow = [values.astype(call.dtype) for values in factors]
    scales = [scales.astype(_SCALES[call.dtype]) for scales in (left_scales, right_scales)]
    return (product(*narrow, *scales),)


_FORWARD = register("block_products", BlockCall, cuda=_forward)


def is_available() -> bool:
    """Returns whether the devices that a traced function is for have the kernel."""
    return hardware_of(platform_in_use()) == "cuda"


def product(
    dtype: str,
    left_GMK: tf.Tensor,
    right_GNK: tf.Tensor,
    left_scales: tf.Tensor,
    right_scales: tf.Tensor,
) -> tf.Tensor:
    """Returns the products [G,M,N] of two factors on one device, in their type.

    Args:
      dtype: the type of 8 or 4 bits that has all values of the factors.
      left_GMK: values of the first factor.
      right_GNK: values of the second factor.
      left_scales: float32 [G,M,blocks of K], numbers of the type of scales.
      right_scales: float32 [G,N,blocks of K], likewise.
    """
    (groups, rows, _), (_, columns, _) = map(known_sizes, (left_GMK.shape, right_GNK.shape))
    result = tf.TensorSpec([groups, rows, columns], left_GMK.dtype)
    operands = [left_GMK, right_GNK, left_scales, right_scales]
    (found,) = _FORWARD.mark(BlockCall(dtype), operands, [result], 1.0)
    return found
