"""Products of tiles in Pallas for Triton, also of factors of 8 bits.

Tensor cores multiply FP8, but Pallas has no product that makes them do it.
"""

from __future__ import annotations

import functools
from typing import Any

from lingvo_gshard.core.lazy import ir, jax, jax_core, jnp, mlir, pallas, triton_lowering

# Tensor cores of an H100 add products of 8 bits with 14 bits of precision. After so many of them
# the sum is added to one in float32, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
_LONGEST_NARROW_SUM = 128


def dot(a: Any, b: Any) -> Any:
    """Returns the float32 product of two tiles; types of 8 bits may differ.

    Triton would round float32 to 10 bits. Pallas' own product converts types of 8 bits to 16.
    """
    if a.dtype.itemsize == 1:
        return _product_of_8_bits().bind(a, b)
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pallas.dot(a, b, precision=precision)


@functools.cache
def _product_of_8_bits() -> Any:
    """Returns the primitive of a product that tensor cores compute in 8 bits."""
    primitive = jax_core.Primitive("product_of_8_bits")

    @primitive.def_abstract_eval
    def _(a: Any, b: Any) -> Any:
        return a.update(shape=(a.shape[0], b.shape[1]), dtype=jnp.dtype(jnp.float32))

    def lower(context: Any, a: Any, b: Any) -> Any:
        shape = ir.RankedTensorType.get(context.avals_out[0].shape, ir.F32Type.get())
        zeros = triton_lowering._zeros(shape)
        return triton_lowering.tt_dialect.dot(
            a, b, zeros, max_num_imprecise_acc=_LONGEST_NARROW_SUM
        )

    triton_lowering.register_lowering(primitive)(lower)
    # Pallas' interpreter computes it so, on CPUs.
    mlir.register_lowering(primitive, mlir.lower_fun(_wide_product, multiple_results=False))
    return primitive


def _wide_product(a: Any, b: Any) -> Any:
    return a.astype(jnp.float32) @ b.astype(jnp.float32)
