"""Grouped products on TPUs: jax's megablox, which computes each group's rows in whole tiles.

Source of the kernel: jax/experimental/pallas/ops/tpu/megablox in https://github.com/jax-ml/jax.

jax.lax.ragged_dot compiles to one kernel for the forward pass as well. But its gradient of the rows
copies the transposed weights, and its gradient of the weights multiplies all rows by every group.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

from lingvo_gshard.core.lazy import jax, jnp, megablox
from lingvo_gshard.kernels import grouped_tpu_scaled
from lingvo_gshard.kernels.grouped_call import GroupedCall, largest_power

# Scales of blocks are multiplied before the product.
HAS_BLOCKS = False
# A TPU's vector unit has this many lanes: smaller tiles leave some empty.
_LANES = 128
# Tiles of rows. A tile that two groups share is computed for both of them.
_FEWEST_ROWS, _MOST_ROWS, _TILES_OF_GROUP = 128, 512, 32
# Sizes of the other two dimensions of a tile.
_SIZES = (4096, 2048, 1024, 512, 256, _LANES)
# A kernel may use 16 MiB of a v5e's vector memory. The compiler needs a part for itself.
_VECTOR_MEMORY = 12 * 2**20
# Larger products of a tile take the compiler long: it unrolls them.
_LARGEST_PRODUCT = 2**29


def obstacle(rows: tuple, weights: tuple, dtype: str, is_rounded: bool) -> str:
    """Returns why megablox cannot compute a product; "" if it can.

    Args:
      rows: shape [R,M] of the rows.
      weights: shape [E,M,H] of the weights.
      dtype: type of the rows.
      is_rounded: whether factors are rounded to 8 bits.
    """
    del rows, is_rounded
    if dtype not in ("bfloat16", "float32"):
        return f"megablox computes bfloat16 and float32, not {dtype}"
    if min(weights[1:]) < _LANES:
        return f"products with fewer than {_LANES} columns are faster without megablox"
    return ""


def computed_share(call: GroupedCall, rows: int, groups: int) -> float:
    """Returns the share of `rows` products of rows that megablox computes for balanced groups.

    Each group but the first begins in a tile that it shares with the group before.
    """
    tile = row_tile(call, groups)
    tiles = -(-call.usual_rows // tile) + call.groups_with_rows(groups) - 1
    return tiles * tile / rows


def padded_rows(call: GroupedCall, rows: int, groups: int) -> int:
    """Returns the number of rows of whole tiles."""
    tile = row_tile(call, groups)
    return -(-rows // tile) * tile


def row_tile(call: GroupedCall, groups: int) -> int:
    """Returns the rows of a tile."""
    limit = call.rows_of_group(groups) // _TILES_OF_GROUP
    return largest_power(limit, _FEWEST_ROWS, _MOST_ROWS)


def forward(
    call: GroupedCall,
    rows_RM: jax.Array,
    weights_EMH: jax.Array,
    sizes_E: jax.Array,
    *scales: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Returns the products [R,H]. Rows after the last group are undefined.

    Args:
      call: the static arguments.
      rows_RM: the rows of all groups, one group after another.
      weights_EMH: the weights of each group; [E,H,M] if the call is transposed.
      sizes_E: int32, the number of rows of each group.
      *scales: of the rows and of the columns, if the call has types of 8 bits.
      interpret: whether to compute on CPUs, step by step.
    """
    count, groups = rows_RM.shape[0], weights_EMH.shape[0]
    tile, dtype = row_tile(call, groups), rows_RM.dtype
    columns = weights_EMH.shape[1 if call.is_transposed else 2]
    rows_RM, weights_EMH = call.factors(rows_RM, weights_EMH)
    sizes = (padded_rows(call, count, groups), rows_RM.shape[1], columns)
    tiles = (tile, *_product_tile(tile, *sizes, groups, rows_RM.dtype.itemsize))
    rows_RM = _padded(rows_RM, sizes[0])
    if call.dtypes:
        row_scales_R1, column_scales_E1H = _padded(scales[0], sizes[0]), scales[1]
        products = grouped_tpu_scaled.product(
            rows_RM, weights_EMH, sizes_E, row_scales_R1, column_scales_E1H, dtype, tiles, interpret
        )
    else:
        products = megablox.gmm(
            rows_RM,
            weights_EMH,
            sizes_E,
            dtype,
            tiles,
            transpose_rhs=call.is_transposed,
            interpret=interpret,
        )
    return (products[:count],)


def weight_gradient(
    call: GroupedCall,
    rows_RM: jax.Array,
    d_products_RH: jax.Array,
    sizes_E: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Returns the gradient [E,M,H] of the weights.

    Args:
      call: the static arguments.
      rows_RM: the rows of all groups, one group after another.
      d_products_RH: the gradient of the products.
      sizes_E: int32, the number of rows of each group.
      interpret: whether to compute on CPUs, step by step.
    """
    count, groups = rows_RM.shape[0], sizes_E.shape[0]
    tile = row_tile(call, groups)
    sizes = (padded_rows(call, count, groups), rows_RM.shape[1], d_products_RH.shape[1])
    rows_RM, d_products_RH = (_padded(x, sizes[0]) for x in (rows_RM, d_products_RH))
    gradient = megablox.tgmm(
        rows_RM.swapaxes(0, 1),
        d_products_RH,
        sizes_E,
        rows_RM.dtype,
        (tile, *_gradient_tile(tile, *sizes, rows_RM.dtype.itemsize)),
        interpret=interpret,
    )
    return (gradient,)


def _padded(rows: Any, count: int) -> Any:
    return jnp.pad(rows, [(0, count - rows.shape[0]), (0, 0)])


@functools.lru_cache(maxsize=64)
def _product_tile(
    tile: int, rows: int, inner: int, outer: int, groups: int, itemsize: int
) -> tuple[int, int]:
    """Returns the tile [inner,outer] of the weights that moves the fewest elements.

    Factors of 8 bits are not masked: their tiles divide the dimension that is summed.

    Args:
      tile: rows of a tile.
      rows: number of rows.
      inner: size of the dimension that the product sums over.
      outer: columns of the product.
      groups: number of groups.
      itemsize: bytes of an element.
    """

    def moved(size: tuple[int, int]) -> int:
        inner_tile, outer_tile = size
        # Tiles of the weights stay in the vector memory for all rows of a group if they are whole.
        readings = groups if inner_tile == inner else rows // tile
        return rows * inner * -(-outer // outer_tile) + readings * inner * outer

    def bytes_used(size: tuple[int, int]) -> int:
        inner_tile, outer_tile = size
        if itemsize == 1 and inner % inner_tile:
            return _VECTOR_MEMORY + 1
        factors = tile * inner_tile + inner_tile * outer_tile
        products = max(itemsize, 2) * tile * outer_tile
        return 2 * (itemsize * factors + products) + 4 * tile * outer_tile

    return _least(moved, bytes_used, tile, inner, outer)


@functools.lru_cache(maxsize=64)
def _gradient_tile(tile: int, rows: int, inner: int, outer: int, itemsize: int) -> tuple[int, int]:
    """Returns the tile [inner,outer] of the weights' gradient that moves the fewest elements.

    Args:
      tile: rows of a tile.
      rows: number of rows.
      inner: columns of the rows.
      outer: columns of the products.
      itemsize: bytes of an element.
    """

    def moved(size: tuple[int, int]) -> int:
        inner_tile, outer_tile = size
        return rows * (inner * -(-outer // outer_tile) + outer * -(-inner // inner_tile))

    def bytes_used(size: tuple[int, int]) -> int:
        columns, elements = sum(size), math.prod(size)
        # Both factors are selected in float32.
        return (2 * itemsize + 4) * tile * columns + (2 * itemsize + 4) * elements

    return _least(moved, bytes_used, tile, inner, outer)


def _least(moved: Any, bytes_used: Any, tile: int, inner: int, outer: int) -> tuple[int, int]:
    """Returns the size of a tile that moves the fewest elements and fits; the larger if equal."""
    inner_sizes, outer_sizes = ({min(size, whole) for size in _SIZES} for whole in (inner, outer))
    fitting = [
        size
        for size in itertools.product(sorted(inner_sizes), sorted(outer_sizes))
        if bytes_used(size) <= _VECTOR_MEMORY and tile * math.prod(size) <= _LARGEST_PRODUCT
    ]
    return min(fitting, key=lambda size: (moved(size), -math.prod(size)))
