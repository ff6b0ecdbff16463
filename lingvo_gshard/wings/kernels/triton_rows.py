"""Rows of arrays in Pallas for Triton, which computes with powers of two and masks what is more."""

from __future__ import annotations

from typing import Any

from lingvo_gshard.core.lazy import jnp, pallas, pallas_triton


def load_rows(ref: Any, dim: int, first: Any = None, size: int = 0, head: Any = None) -> Any:
    """Returns rows of an array, with zeros beyond the size of its heads.

    Args:
      ref: the array [rows,D], or [heads,rows,D].
      dim: size of D without padding.
      first: the first row; None for all rows.
      size: number of rows.
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
