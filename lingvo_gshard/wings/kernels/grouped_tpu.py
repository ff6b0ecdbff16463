"""Grouped products on TPUs: jax's megablox, which computes each group's rows in whole tiles.

What megablox lacks is computed by a kernel of our own: factors of 8 bits, sums of several products,
and activations, which XLA cannot fuse into a kernel.

Source of the kernel: jax/experimental/pallas/ops/tpu/megablox in https://github.com/jax-ml/jax.

jax.lax.ragged_dot compiles to one kernel for the forward pass as well. But its gradient of the rows
copies the transposed weights, and its gradient of the weights multiplies all rows by every group.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import megablox
from lingvo_gshard.wings.kernels.grouped_call import GroupedCall, largest_power
from lingvo_gshard.wings.kernels.grouped_tpu_product import GroupedProduct

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
    """Returns why megablox cannot multiply rows [R,M] by weights [E,M,H]; "" if it can."""
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
      rows_RM: the rows of all groups, one group after another.
      weights_EMH: the weights of each group; [E,H,M] if the call is transposed.
      sizes_E: int32, the number of rows of each group.
      *scales: of the rows and of the columns, if the call has types of 8 bits.
    """
    count, dtype = rows_RM.shape[0], rows_RM.dtype
    rows_RM, weights_EMH = call.factors(rows_RM, weights_EMH)
    (rows_RM,), tiles = _fitted(call, [rows_RM], [weights_EMH])
    if call.dtypes:
        product = GroupedProduct(tiles, (dtype,), call.is_transposed, finish=_scaled)
        row_scales_R1, column_scales_E1H = _padded(scales[0], rows_RM.shape[0]), scales[1]
        others = [row_scales_R1, column_scales_E1H]
        (products,) = product.run([[rows_RM]], [weights_EMH], sizes_E, others, interpret)
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


def summed(
    call: GroupedCall, sizes_E: jax.Array, *factors: jax.Array, interpret: bool = False
) -> tuple:
    """Returns the sum [R,H] of products. Rows after the last group are undefined.

    The factors are arrays [R,M] of rows, then as many arrays of weights, as in `forward`.
    """
    pairs = len(factors) // 2
    count, dtype = factors[0].shape[0], factors[0].dtype
    rows, tiles = _fitted(call, factors[:pairs], factors[pairs:])
    product = GroupedProduct(tiles, (dtype,), call.is_transposed)
    by_weight = [[each] for each in rows]
    (products,) = product.run(by_weight, factors[pairs:], sizes_E, interpret=interpret)
    return (products[:count],)


def activated(
    call: GroupedCall,
    weights_EHM: jax.Array,
    sizes_E: jax.Array,
    *hidden_RH: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Returns the products [R,M] of activated rows. Those after the last group are undefined.

    Args:
      call: the static arguments, with an activation.
      *hidden_RH: the arrays that the activation takes, one group after another.
    """
    assert call.activation is not None
    count, dtype = hidden_RH[0].shape[0], hidden_RH[0].dtype
    rows, tiles = _fitted(call, hidden_RH, [weights_EHM])
    product = GroupedProduct(tiles, (dtype,), combine=call.activation)
    (products,) = product.run([rows], [weights_EHM], sizes_E, interpret=interpret)
    return (products[:count],)


def activated_gradient(
    call: GroupedCall,
    d_products_RM: jax.Array,
    weights_EHM: jax.Array,
    sizes_E: jax.Array,
    *hidden_RH: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Returns the gradient [R,H] of each hidden array, and the activated rows [R,H].

    Rows after the last group are undefined. The call is transposed and has an activation.
    """
    assert call.activation is not None
    count, dtype = hidden_RH[0].shape[0], hidden_RH[0].dtype
    results = 2 * len(hidden_RH) + 1
    (rows,), tiles = _fitted(call, [d_products_RM], [weights_EHM], results)
    hidden = [_padded(each, rows.shape[0]) for each in hidden_RH]
    dtypes = (dtype,) * (len(hidden) + 1)
    product = GroupedProduct(
        tiles, dtypes, call.is_transposed, finish=call.activation.with_gradient
    )
    found = product.run([[rows]], [weights_EHM], sizes_E, hidden, interpret)
    return tuple(each[:count] for each in found)


def weight_gradient(
    call: GroupedCall,
    rows_RM: jax.Array,
    d_products_RH: jax.Array,
    sizes_E: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Returns the gradient [E,M,H] of the weights. The rows are sorted by group."""
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


class _Arrays(NamedTuple):
    """The number of arrays of each kind that a kernel of products holds tiles from.

    Results have the size of the products.
    """

    rows: int
    weights: int
    results: int


def _fitted(
    call: GroupedCall, rows: Sequence[Any], weights: Sequence[Any], results: int = 1
) -> tuple[list[Any], tuple[int, int, int]]:
    """Returns the rows, padded to whole tiles, and the sizes of a tile along R, M and H.

    Args:
      rows: arrays [R,M] that are combined or multiplied.
      weights: arrays [E,M,H], or [E,H,M] if the call is transposed.
      results: the number of arrays [R,H] that the kernel reads and writes.
    """
    groups, *sides = weights[0].shape
    inner, outer = reversed(sides) if call.is_transposed else sides
    tile, count = row_tile(call, groups), padded_rows(call, rows[0].shape[0], groups)
    arrays, itemsize = _Arrays(len(rows), len(weights), results), rows[0].dtype.itemsize
    others = _product_tile(tile, count, inner, outer, groups, itemsize, arrays)
    return [_padded(each, count) for each in rows], (tile, *others)


def _scaled(sums: Any, row_scales: Any, column_scales: Any) -> tuple:
    return (sums * row_scales * column_scales,)


def _padded(rows: Any, count: int) -> Any:
    return jnp.pad(rows, [(0, count - rows.shape[0]), (0, 0)])


@functools.lru_cache(maxsize=64)
def _product_tile(
    tile: int, rows: int, inner: int, outer: int, groups: int, itemsize: int, arrays: _Arrays
) -> tuple[int, int]:
    """Returns the tile [inner,outer] of the weights that moves the fewest elements.

    The product of `rows` rows, in tiles of `tile`, sums over `inner` and has `outer` columns.
    """

    def moved(size: tuple[int, int]) -> int:
        inner_tile, outer_tile = size
        # Tiles of the weights stay in the vector memory for all rows of a group if they are whole.
        readings = groups if inner_tile == inner else rows // tile
        of_rows = arrays.rows * rows * inner * -(-outer // outer_tile)
        return of_rows + arrays.weights * readings * inner * outer

    def bytes_used(size: tuple[int, int]) -> int:
        inner_tile, outer_tile = size
        factors = arrays.rows * tile * inner_tile + arrays.weights * inner_tile * outer_tile
        products = arrays.results * max(itemsize, 2) * tile * outer_tile
        # Functions of several arrays have each of them in float32 as well.
        wide = tile * (arrays.results * outer_tile + (arrays.rows - 1) * inner_tile)
        return 2 * (itemsize * factors + products) + 4 * wide

    return _least(moved, bytes_used, tile, inner, outer)


@functools.lru_cache(maxsize=64)
def _gradient_tile(tile: int, rows: int, inner: int, outer: int, itemsize: int) -> tuple[int, int]:
    """Returns the tile [inner,outer] of the weights' gradient that moves the fewest elements.

    It sums over `rows` rows, in tiles of `tile`.
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
