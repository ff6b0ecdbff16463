"""Grouped products for GPUs in Pallas: each program computes one tile of one group.

XLA for GPUs multiplies all rows by the weights of every group (jax.lax.ragged_dot), and jax's own
grouped kernels for GPUs compile for one generation each.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import pallas, pallas_triton
from lingvo_gshard.wings.kernels.grouped_call import GroupedCall, largest_power
from lingvo_gshard.wings.kernels.triton_rows import Range, dot, load_tile, store_tile

# Tiles of rows. A group's last tile may have fewer rows.
_FEWEST_ROWS, _MOST_ROWS = 16, 128
# The least size of the other dimensions of a tile that tensor cores multiply: in 8 bits, it is 32.
_LEAST_COLUMNS, _LEAST_NARROW_COLUMNS = 16, 32
# Consecutive programs compute this many tiles of rows, so that they share weights in the cache.
_SHARED_TILES = 8
# The largest tile of factors of 8 bits, which is also the size of the blocks that have scales.
_BLOCK = 128
HAS_BLOCKS = True
# Offsets within an array are int32.
_MOST_ELEMENTS = 2**31


def obstacle(rows: tuple, weights: tuple, dtype: str, is_rounded: bool) -> str:
    """Returns why the kernel cannot compute a product; "" if it can. See grouped_tpu.py."""
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"grouped products are of 16-bit floats and float32, not {dtype}"
    least = _LEAST_NARROW_COLUMNS if is_rounded else _LEAST_COLUMNS
    if min(weights[1:]) < least:
        return f"tensor cores multiply {least} columns or more"
    groups, inner, outer = weights
    if max(groups * inner * outer, rows[0] * max(inner, outer)) >= _MOST_ELEMENTS:
        return "an array has 2^31 elements or more; split the experts over more devices"
    return ""


def computed_share(call: GroupedCall, rows: int, groups: int) -> float:
    """Returns the share of `rows` products of rows that the kernel computes for balanced groups."""
    tile = row_tile(call, groups)
    size = call.rows_of_group(groups)
    return call.groups_with_rows(groups) * -(-size // tile) * tile / rows


def padded_rows(call: GroupedCall, rows: int, groups: int) -> int:
    """Returns the number of rows: the kernel masks what is beyond the last group."""
    del call, groups
    return rows


def row_tile(call: GroupedCall, groups: int) -> int:
    """Returns the rows of a tile."""
    return largest_power(call.rows_of_group(groups) // 2, _FEWEST_ROWS, _MOST_ROWS)


def forward(
    call: GroupedCall,
    rows_RM: jax.Array,
    weights_EMH: jax.Array,
    sizes_E: jax.Array,
    *scales: jax.Array,
    added_RH: jax.Array | None = None,
    interpret: bool = False,
) -> tuple:
    """Returns the products [R,H]. Rows after the last group are undefined.

    Arguments are as in grouped_tpu.py, but blocks can have scales in place of rows and columns,
    rows can have 8 bits already, and rows `added_RH` are added to the products.
    """
    count, inner = rows_RM.shape
    outer = weights_EMH.shape[1 if call.is_transposed else 2]
    shape = jax.ShapeDtypeStruct((count, outer), weights_EMH.dtype)
    added = [] if added_RH is None else [added_RH]
    rows_RM, weights_EMH = call.factors(rows_RM, weights_EMH)
    tiles = _Tiles.of(row_tile(call, sizes_E.shape[0]), inner, outer, rows_RM.dtype)
    ranges = _row_tiles(sizes_E, count, tiles.rows)
    columns = -(-outer // tiles.outer)
    products = pallas.pallas_call(
        functools.partial(_product_tile, tiles, call, columns, len(added)),
        grid=(ranges[0].shape[0] * columns,),
        out_shape=shape,
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="grouped_product",
    )(*ranges, rows_RM, weights_EMH, *scales, *added)
    return (products,)


def summed(
    call: GroupedCall, sizes_E: jax.Array, *factors: jax.Array, interpret: bool = False
) -> tuple:
    """Returns the sum [R,H] of the products of several rows.

    Rows after the last group are undefined. Arguments are as in grouped_tpu.py. If the call has
    types of 8 bits, scales of the rows and scales of the weights follow.
    """
    pairs = len(factors) // (4 if call.dtypes else 2)
    kinds = [factors[first : first + pairs] for first in range(0, len(factors), pairs)]
    total = None
    for each in zip(*kinds, strict=True):
        rows, weights, *scales = each
        (total,) = forward(
            call, rows, weights, sizes_E, *scales, added_RH=total, interpret=interpret
        )
    return (total,)


def weight_gradient(
    call: GroupedCall,
    rows_RM: jax.Array,
    d_products_RH: jax.Array,
    sizes_E: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Returns the gradient [E,M,H] of the weights. Arguments are as in grouped_tpu.py."""
    del call
    inner, outer, groups = rows_RM.shape[1], d_products_RH.shape[1], sizes_E.shape[0]
    tiles = _Tiles.of(_MOST_ROWS, inner, outer, rows_RM.dtype)
    # The product sums over rows; its tile has columns of the rows in place of rows.
    tiles = dataclasses.replace(tiles, rows=tiles.inner, inner=largest_power(inner, 16, tiles.rows))
    ends_E = jnp.cumsum(sizes_E)
    gradient = pallas.pallas_call(
        functools.partial(_gradient_tile, tiles),
        grid=(-(-outer // tiles.outer), -(-inner // tiles.inner), groups),
        out_shape=jax.ShapeDtypeStruct((groups, inner, outer), rows_RM.dtype),
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
        name="grouped_product_gradient",
    )(ends_E - sizes_E, ends_E, rows_RM, d_products_RH)
    return (gradient,)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The sizes of the tiles of a product, all of them powers of two.

    Attributes:
      inner: elements that one step of the product sums over.
      outer: columns of a tile of the product.
      warps: warps of a program.
      stages: steps whose factors are loaded ahead.
    """

    rows: int
    inner: int
    outer: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, inner: int, outer: int, dtype: Any) -> _Tiles:
        """Returns tiles whose factors fit into the 99 KiB of shared memory of every GPU.

        The product sums over `inner` and has `outer` columns.
        """
        if dtype == jnp.float32:
            most_inner, most_outer, stages, rows = 32, 64, 2, min(rows, 64)
        else:
            most_inner, most_outer, stages = _BLOCK // dtype.itemsize, _BLOCK, 3
        fitted_inner, fitted_outer = (
            largest_power(size, _LEAST_COLUMNS, most)
            for size, most in ((inner, most_inner), (outer, most_outer))
        )
        warps = 8 if rows * fitted_outer > 64 * 128 else 4
        return cls(rows, fitted_inner, fitted_outer, warps, stages)

    def compiler_params(self) -> Any:
        """Returns the parameters of Triton."""
        return pallas_triton.CompilerParams(num_warps=self.warps, num_stages=self.stages)


def _row_tiles(sizes_E: jax.Array, rows: int, tile: int) -> tuple:
    """Returns each tile's group, its first row, and the row after the group's last.

    All are int32 arrays with room for the tiles of groups of any sizes. Tiles that no group needs
    have no rows.
    """
    tiles_E = -(-sizes_E // tile)
    last_tiles_E, last_rows_E = jnp.cumsum(tiles_E), jnp.cumsum(sizes_E)
    index = jnp.arange(-(-rows // tile) + sizes_E.shape[0] - 1, dtype=jnp.int32)
    group = (index[:, None] >= last_tiles_E[None]).sum(1, dtype=jnp.int32)
    is_used = group < sizes_E.shape[0]
    group = jnp.minimum(group, sizes_E.shape[0] - 1)
    index_in_group = index - (last_tiles_E - tiles_E)[group]
    first = (last_rows_E - sizes_E)[group] + index_in_group * tile
    return group, first, jnp.where(is_used, last_rows_E[group], 0)


def _product_tile(
    tiles: _Tiles,
    call: GroupedCall,
    columns: int,
    added: int,
    group_ref: Any,
    first_ref: Any,
    end_ref: Any,
    rows_ref: Any,
    weights_ref: Any,
    *refs: Any,
) -> None:
    *others, products_ref = refs
    scales, added_refs = others[: len(others) - added], others[len(others) - added :]
    tile, column = _in_order(pallas.program_id(0), group_ref.shape[0], columns)
    group, first, end = group_ref[tile], first_ref[tile], end_ref[tile]
    inner, outer = rows_ref.shape[1], products_ref.shape[1]
    rows = Range.of(first, tiles.rows, end)
    of_outer = Range.of(column * tiles.outer, tiles.outer, outer)

    @pallas.when(first < end)
    def _() -> None:
        def add_step(step: Any, total: Any) -> Any:
            of_inner = Range.of(step * tiles.inner, tiles.inner, inner)
            left = load_tile(rows_ref, (), rows, of_inner)
            if call.is_transposed:
                right = load_tile(weights_ref, (group,), of_outer, of_inner).T
            else:
                right = load_tile(weights_ref, (group,), of_inner, of_outer)
            product = dot(left, right)
            if call.block:
                # A tile is a part of one block of the weights, and of one of each row.
                block = step * tiles.inner // call.block
                product *= load_tile(scales[0], (), rows, Range.of(block, 1, scales[0].shape[1]))
                product *= scales[1][group, column * tiles.outer // call.block, block]
            return total + product

        zeros = jnp.zeros((tiles.rows, tiles.outer), jnp.float32)
        total = jax.lax.fori_loop(0, -(-inner // tiles.inner), add_step, zeros)
        if scales and not call.block:
            one = Range.of(0, 1, 1)
            total *= load_tile(scales[0], (), rows, one) * load_tile(
                scales[1], (group,), one, of_outer
            )
        for each in added_refs:
            total += load_tile(each, (), rows, of_outer).astype(jnp.float32)
        store_tile(products_ref, (), rows, of_outer, total)


def _in_order(program: Any, tiles: int, columns: int) -> tuple[Any, Any]:
    """Returns the tile of rows and of columns that a program computes.

    Programs that run together share rows and weights in the cache, as in
    https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html.
    """
    share = program // (_SHARED_TILES * columns)
    first = share * _SHARED_TILES
    size = jnp.minimum(tiles - first, _SHARED_TILES)
    within = program - first * columns
    return first + within % size, within // size


def _gradient_tile(
    tiles: _Tiles,
    starts_ref: Any,
    ends_ref: Any,
    rows_ref: Any,
    d_products_ref: Any,
    d_weights_ref: Any,
) -> None:
    group = pallas.program_id(2)
    start, end = starts_ref[group], ends_ref[group]
    of_inner = Range.of(pallas.program_id(1) * tiles.inner, tiles.inner, rows_ref.shape[1])
    of_outer = Range.of(pallas.program_id(0) * tiles.outer, tiles.outer, d_products_ref.shape[1])

    def add_step(step: Any, total: Any) -> Any:
        rows = Range.of(start + step * tiles.rows, tiles.rows, end)
        left = load_tile(rows_ref, (), rows, of_inner)
        right = load_tile(d_products_ref, (), rows, of_outer)
        return total + dot(left.T, right)

    zeros = jnp.zeros((tiles.inner, tiles.outer), jnp.float32)
    steps = pallas.cdiv(end - start, tiles.rows)
    total = jax.lax.fori_loop(0, steps, add_step, zeros)
    store_tile(d_weights_ref, (group,), of_inner, of_outer, total)
