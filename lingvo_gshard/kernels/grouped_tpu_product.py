"""Grouped products of factors of 8 bits on TPUs, in Pallas: sums of a tile times their scales.

The grid is as in jax's megablox, which multiplies factors of 16 and 32 bits alone.
"""

from __future__ import annotations

import functools
from typing import Any

from lingvo_gshard.core.lazy import jax, jnp, megablox, pallas, pallas_tpu

_SUMMED_LAST = (((1,), (1,)), ((), ()))


def product(
    rows_RM: jax.Array,
    weights_EHM: jax.Array,
    sizes_E: jax.Array,
    row_scales_R1: jax.Array,
    column_scales_E1H: jax.Array,
    dtype: Any,
    tiles: tuple[int, int, int],
    interpret: bool = False,
) -> jax.Array:
    """Returns the products [R,H]. Rows after the last group are undefined.

    Args:
      rows_RM: the rows of all groups in 8 bits, one group after another; whole tiles of them.
      weights_EHM: the weights of each group in 8 bits.
      sizes_E: int32, the number of rows of each group.
      row_scales_R1: float32, what the products of a row are multiplied by.
      column_scales_E1H: float32, what the products of a column are multiplied by.
      dtype: type of the products.
      tiles: the sizes of a tile along R, M and H. The size along M divides M.
      interpret: whether to compute on CPUs, step by step.
    """
    (count, inner), (groups, outer, _) = rows_RM.shape, weights_EHM.shape
    tile_R, tile_M, tile_H = tiles
    metadata, used_tiles = megablox.make_group_metadata(
        group_sizes=sizes_E,
        m=count,
        tm=tile_R,
        start_group=jnp.int32(0),
        num_nonzero_groups=groups,
        visit_empty_groups=False,
    )
    sums = jnp.int32 if rows_RM.dtype == jnp.int8 else jnp.float32
    specs = [
        pallas.BlockSpec((tile_R, tile_M), lambda h, g, m, meta: (meta[2][g], m)),
        pallas.BlockSpec((None, tile_H, tile_M), lambda h, g, m, meta: (meta[1][g], h, m)),
        pallas.BlockSpec((tile_R, 1), lambda h, g, m, meta: (meta[2][g], 0)),
        pallas.BlockSpec((None, 1, tile_H), lambda h, g, m, meta: (meta[1][g], 0, h)),
    ]
    return pallas.pallas_call(
        functools.partial(_tile, inner // tile_M),
        grid_spec=pallas_tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-outer // tile_H), used_tiles, inner // tile_M),
            in_specs=specs,
            out_specs=pallas.BlockSpec((tile_R, tile_H), lambda h, g, m, meta: (meta[2][g], h)),
            scratch_shapes=[pallas_tpu.VMEM((tile_R, tile_H), sums)],
        ),
        out_shape=jax.ShapeDtypeStruct((count, outer), dtype),
        compiler_params=pallas_tpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        interpret=interpret,
        name="grouped_product_of_8_bits",
    )(metadata, rows_RM, weights_EHM, row_scales_R1, column_scales_E1H)


def _tile(
    steps: int,
    metadata: tuple,
    rows_ref: Any,
    weights_ref: Any,
    row_scales_ref: Any,
    column_scales_ref: Any,
    products_ref: Any,
    sums_ref: Any,
) -> None:
    """Adds a step of the sums of a tile; after the last one, stores the rows of the group."""
    place, step = pallas.program_id(1), pallas.program_id(2)

    @pallas.when(step == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    sums_ref[...] += jax.lax.dot_general(
        rows_ref[...], weights_ref[...], _SUMMED_LAST, preferred_element_type=sums_ref.dtype
    )

    @pallas.when(step == steps - 1)
    def _() -> None:
        offsets, groups, row_tiles = metadata
        first = row_tiles[place] * sums_ref.shape[0]
        row = jax.lax.broadcasted_iota(jnp.int32, sums_ref.shape, 0) + first
        is_own = (row >= offsets[groups[place]]) & (row < offsets[groups[place] + 1])
        scaled = sums_ref[...].astype(jnp.float32) * row_scales_ref[...] * column_scales_ref[...]
        # The next group's rows of this tile come later, the last one's are here already.
        others = products_ref[...].astype(jnp.float32)
        products_ref[...] = jnp.where(is_own, scaled, others).astype(products_ref.dtype)
