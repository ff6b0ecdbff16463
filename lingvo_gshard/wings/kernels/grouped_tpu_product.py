"""Grouped products on TPUs, in Pallas, with functions of the factors and of the sums of a tile.

The grid is as in jax's megablox, which computes single products of factors of 16 and 32 bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import megablox, pallas, pallas_tpu


@dataclasses.dataclass(frozen=True)
class GroupedProduct:
    """The products of rows, sorted by group, with the weights of their groups, in tiles.

    Attributes:
      tiles: the sizes of a tile along R, M and H.
      is_transposed: whether the weights are [E,H,M].
      combine: maps tiles of arrays of rows to the tile that is multiplied.
      finish: maps the sums of a tile, and its tiles of `others`, to a tuple: a tile of each result.
    """

    tiles: tuple[int, int, int]
    dtypes: tuple[Any, ...]
    is_transposed: bool = False
    combine: Callable[..., Any] = lambda x: x
    finish: Callable[..., tuple] = lambda sums: (sums,)

    def run(
        self,
        rows: Sequence[Sequence[jax.Array]],
        weights: Sequence[jax.Array],
        sizes_E: jax.Array,
        others: Sequence[jax.Array] = (),
        interpret: bool = False,
    ) -> list:
        """Returns the results [R,H]. Rows after the last group are undefined.

        Args:
          rows: for each of the weights, arrays [R,M] of the rows of all groups, one group after
            another; whole tiles of them. The products with several weights are added.
          weights: arrays [E,M,H], or [E,H,M], of the weights of each group.
          sizes_E: int32, the number of rows of each group.
          others: arrays [R,H], [R,1] or [E,1,H] for `finish`.
        """
        (count, inner), (groups, *sides) = rows[0][0].shape, weights[0].shape
        outer = sides[0 if self.is_transposed else 1]
        tile_R, tile_M, tile_H = self.tiles
        metadata, used_tiles = megablox.make_group_metadata(
            group_sizes=sizes_E,
            m=count,
            tm=tile_R,
            start_group=jnp.int32(0),
            num_nonzero_groups=groups,
            visit_empty_groups=False,
        )
        sums = jnp.int32 if rows[0][0].dtype == jnp.int8 else jnp.float32
        row_spec = pallas.BlockSpec(self.tiles[:2], lambda h, g, m, meta: (meta[2][g], m))
        specs = [row_spec] * len(rows) * len(rows[0]) + [self._weight_spec] * len(weights)
        specs += map(self._other_spec, others)
        return pallas.pallas_call(
            functools.partial(self._compute_tile, len(weights), len(rows[0]), inner),
            grid_spec=pallas_tpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(-(-outer // tile_H), used_tiles, -(-inner // tile_M)),
                in_specs=specs,
                out_specs=[self._result_spec] * len(self.dtypes),
                scratch_shapes=[pallas_tpu.VMEM((tile_R, tile_H), sums)],
            ),
            out_shape=[jax.ShapeDtypeStruct((count, outer), dtype) for dtype in self.dtypes],
            compiler_params=pallas_tpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary")
            ),
            interpret=interpret,
            name="grouped_product",
        )(metadata, *(x for each in rows for x in each), *weights, *others)

    @property
    def _weight_spec(self) -> Any:
        _, tile_M, tile_H = self.tiles
        if self.is_transposed:
            return pallas.BlockSpec(
                (None, tile_H, tile_M), lambda h, g, m, meta: (meta[1][g], h, m)
            )
        return pallas.BlockSpec((None, tile_M, tile_H), lambda h, g, m, meta: (meta[1][g], m, h))

    @property
    def _result_spec(self) -> Any:
        return pallas.BlockSpec(self.tiles[::2], lambda h, g, m, meta: (meta[2][g], h))

    def _other_spec(self, other: Any) -> Any:
        tile_R, _, tile_H = self.tiles
        if other.ndim == 3:
            return pallas.BlockSpec((None, 1, tile_H), lambda h, g, m, meta: (meta[1][g], 0, h))
        if other.shape[1] == 1:
            return pallas.BlockSpec((tile_R, 1), lambda h, g, m, meta: (meta[2][g], 0))
        return self._result_spec

    def _compute_tile(
        self, pairs: int, arrays: int, inner: int, metadata: tuple, *refs: Any
    ) -> None:
        """Adds one step to a tile's sums; in the last step, stores the rows of the tile's group."""
        rows_refs, refs = refs[: pairs * arrays], refs[pairs * arrays :]
        weights_refs, refs = refs[:pairs], refs[pairs:]
        results = len(self.dtypes)
        others_refs, result_refs, sums_ref = refs[: -results - 1], refs[-results - 1 : -1], refs[-1]
        place, step, steps = pallas.program_id(1), pallas.program_id(2), pallas.num_programs(2)

        @pallas.when(step == 0)
        def _() -> None:
            sums_ref[...] = jnp.zeros_like(sums_ref)

        def add(limit: int) -> None:
            for pair, weights_ref in enumerate(weights_refs):
                own = rows_refs[pair * arrays : (pair + 1) * arrays]
                left = _cut(self.combine(*(ref[...] for ref in own)), 1, limit)
                summed = 1 if self.is_transposed else 0
                right = _cut(weights_ref[...], summed, limit)
                sums_ref[...] += jax.lax.dot_general(
                    left,
                    right,
                    (((1,), (summed,)), ((), ())),
                    preferred_element_type=sums_ref.dtype,
                )

        rest = inner % self.tiles[1]
        if rest:
            pallas.when(step < steps - 1)(functools.partial(add, 0))
            pallas.when(step == steps - 1)(functools.partial(add, rest))
        else:
            add(0)

        @pallas.when(step == steps - 1)
        def _() -> None:
            offsets, groups, row_tiles = metadata
            first = row_tiles[place] * sums_ref.shape[0]
            row = jax.lax.broadcasted_iota(jnp.int32, sums_ref.shape, 0) + first
            is_own = (row >= offsets[groups[place]]) & (row < offsets[groups[place] + 1])
            sums = sums_ref[...].astype(jnp.float32)
            finished = self.finish(sums, *(ref[...] for ref in others_refs))
            for result_ref, values in zip(result_refs, finished, strict=True):
                # The next group's rows of this tile come later, the last one's are here already.
                others = result_ref[...].astype(jnp.float32)
                result_ref[...] = jnp.where(is_own, values, others).astype(result_ref.dtype)


def _cut(x: Any, dimension: int, limit: int) -> Any:
    """Returns a tile with zeros from an index on; as it is if the limit is 0.

    What lies beyond the end of an array is undefined.
    """
    if not limit:
        return x
    wide = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, dimension)
    return jnp.where(index < limit, x.astype(wide), 0).astype(x.dtype)
