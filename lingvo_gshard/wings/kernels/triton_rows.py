"""Tiles of arrays and their products in Pallas for Triton.

Triton computes with powers of two and masks what is more. Tensor cores multiply FP8, but Pallas has
no product that makes them do it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import ir, jax_core, mlir, pallas, pallas_triton, triton_lowering

# Tensor cores of an H100 add products of 8 bits with 14 bits of precision. After so many of them
# the sum is added to one in float32, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
_LONGEST_NARROW_SUM = 128


def load_rows(ref: Any, dim: int, first: Any = None, size: int = 0, head: Any = None) -> Any:
    """Returns rows of an array, with zeros beyond the size of its heads.

    Args:
      ref: the array [rows,D], or [heads,rows,D].
      dim: size of D without padding.
      first: the first row; None for all rows.
      head: the head, if the array has several.
    """
    index = () if first is None else (pallas.ds(first, size), slice(None))
    index = index if head is None else (head, *index)
    if ref.shape[-1] == dim:
        return ref[index or ...]
    rows = ref.at[index] if index else ref
    return pallas_triton.load(rows, mask=_within(ref.shape[-1], dim), other=0.0)


def store_rows(ref: Any, x: Any, dim: int) -> None:
    """Writes a tile in the type of the array, without what is beyond the size of its heads."""
    x = x.astype(ref.dtype)
    if ref.shape[-1] == dim:
        ref[...] = x
    else:
        pallas_triton.store(ref, x, mask=_within(ref.shape[-1], dim))


def _within(padded: int, dim: int) -> Any:
    return (jnp.arange(padded) < dim)[None, :]


def padded_dim(x: Any) -> int:
    """Returns the power of two that holds the size of an array's heads."""
    return 1 << (x.shape[-1] - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Range:
    """Consecutive indices of one dimension.

    Attributes:
      is_inside: whether each index is before the end of the dimension, or of a group.
    """

    indices: Any
    is_inside: Any

    @classmethod
    def of(cls, first: Any, size: int, end: Any) -> Range:
        """Returns `size` indices from `first` on, with an end."""
        indices = first + jnp.arange(size, dtype=jnp.int32)
        return cls(indices, indices < end)


def _tile_of(ref: Any, lead: tuple, rows: Range, columns: Range) -> tuple[Any, Any]:
    """Returns a tile of an array, and bool [rows,columns]: which elements are inside the array."""
    shape = (rows.indices.size, columns.indices.size)
    index = (
        jnp.broadcast_to(rows.indices[:, None], shape),
        jnp.broadcast_to(columns.indices[None], shape),
    )
    mask = rows.is_inside[:, None] & columns.is_inside[None]
    return ref.at[(*lead, *index)], mask


def load_tile(ref: Any, lead: tuple, rows: Range, columns: Range) -> Any:
    """Returns a tile of an array at the indices `lead`, with zeros beyond the ends of ranges."""
    tile, mask = _tile_of(ref, lead, rows, columns)
    return pallas_triton.load(tile, mask=mask, other=0.0)


def store_tile(ref: Any, lead: tuple, rows: Range, columns: Range, values: Any) -> None:
    """Writes the part of a tile that is before the ends; see `load_tile`."""
    tile, mask = _tile_of(ref, lead, rows, columns)
    pallas_triton.store(tile, values.astype(ref.dtype), mask=mask)


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
    multiply = mlir.lower_fun(
        lambda a, b: a.astype(jnp.float32) @ b.astype(jnp.float32), multiple_results=False
    )
    mlir.register_lowering(primitive, multiply)
    return primitive
