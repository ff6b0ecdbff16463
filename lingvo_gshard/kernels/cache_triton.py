"""Attention over a cache on GPUs, in Pallas for Triton: reads the visible blocks of slots only.

The visible blocks of a row are divided among several programs, whose sums are joined afterwards, so
that few texts keep the whole GPU busy (Flash-Decoding, Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). jax's own decode_attention knows neither
rings, windows, caps nor sinks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from lingvo_gshard.core.lazy import jax, jnp, pallas, pallas_triton
from lingvo_gshard.kernels.attention_triton import (
    dot,
    load_rows,
    logits_of,
    padded_dim,
    store_rows,
)
from lingvo_gshard.kernels.cache_call import Cache, CacheCall
from lingvo_gshard.kernels.call import HIDDEN, pad

_LARGEST_HEAD = 256
# Triton multiplies no matrices with fewer rows.
_LEAST_ROWS = 16
_MOST_ROWS = 64
_BLOCK = 64
# Programs that keep an H100 busy: two for each of its 132 multiprocessors.
_PROGRAMS = 264


def obstacle(call: CacheCall, query: tuple, keys: tuple, values: tuple, dtype: str) -> str:
    """Returns why the kernel cannot compute a call; "" if it can.

    Args:
      call: the static arguments.
      query: shape [B,N,D] of the queries.
      keys: shape [B,N,K,D] of the keys.
      values: shape [B,N,K,D] of the values.
      dtype: type of the queries.
    """
    del call, query
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"the kernel of a cache computes 16-bit floats and float32, not {dtype}"
    if max(keys[3], values[3]) > _LARGEST_HEAD:
        return f"the kernel of a cache has heads of at most {_LARGEST_HEAD}, not {keys[3]}"
    if keys[2] < _LEAST_ROWS:
        return f"{keys[2]} slots are fewer than the {_LEAST_ROWS} of the smallest block"
    return ""


def block_size(call: CacheCall, keys: tuple, values: tuple, dtype: str) -> int:
    """Returns the slots of a block.

    Args:
      call: the static arguments.
      keys: shape [B,N,K,D] of the keys.
      values: shape [B,N,K,D] of the values.
      dtype: their type.
    """
    del call
    is_large = jnp.dtype(dtype).itemsize * max(keys[3], values[3]) > 256
    # Triton computes with powers of two.
    return min(_BLOCK // 2 if is_large else _BLOCK, 1 << (keys[2].bit_length() - 1))


def forward(call: CacheCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the output [B,N,D] of one new token of each row.

    Args:
      call: the static arguments.
      *operands: the arrays that `Cache.of` names.
      interpret: whether to compute on CPUs, step by step.
    """
    cache = Cache.of(call, operands)
    batch, shared, group, _ = cache.query.shape
    value_dim = cache.values.shape[3]
    tiles = _Tiles.of(call, cache)
    rows = -(-group // tiles.rows) * tiles.rows
    query = pad(cache.query, 2, rows)
    first, count = cache.blocks(tiles.block)

    def whole(x: Any) -> Any:
        shape = (None, None, x.shape[2], padded_dim(x))
        return pallas.BlockSpec(shape, lambda s, b, n, i: (b, n, 0, 0))

    number = pallas.BlockSpec((1,), lambda s, b, n, i: (b,))
    inputs = [
        (
            query,
            pallas.BlockSpec(
                (None, None, tiles.rows, padded_dim(query)), lambda s, b, n, i: (b, n, i, 0)
            ),
        ),
        (cache.keys, whole(cache.keys)),
        (cache.values, whole(cache.values)),
        (cache.newest, pallas.BlockSpec((1,), lambda s, b, n, i: (0,))),
        *((x, number) for x in (cache.reach, first, count)),
    ]
    shape = (tiles.splits, batch, shared, rows)
    of_row = pallas.BlockSpec((None, None, None, tiles.rows), lambda s, b, n, i: (s, b, n, i))
    mixed_tile = pallas.BlockSpec(
        (None, None, None, tiles.rows, padded_dim(cache.values)), lambda s, b, n, i: (s, b, n, i, 0)
    )
    sums, largest, totals = pallas.pallas_call(
        functools.partial(_tile, tiles),
        grid=(tiles.splits, batch, shared, rows // tiles.rows),
        in_specs=[spec for _, spec in inputs],
        out_specs=[mixed_tile, of_row, of_row],
        out_shape=[
            jax.ShapeDtypeStruct((*shape, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=pallas_triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="cache_attention",
    )(*(x for x, _ in inputs))
    sums, largest, totals = (x[:, :, :, :group] for x in (sums, largest, totals))
    mixed = _joined(sums, largest, totals, cache.sinks).astype(query.dtype)
    return (mixed.reshape(batch, shared * group, value_dim),)


def _joined(sums: Any, largest: Any, totals: Any, sinks: Any) -> Any:
    """Returns the output [B,N,G,D] from the sums of all parts, with a first dimension of parts."""
    most = largest.max(0)
    if sinks is not None:
        most = jnp.maximum(most, sinks)
    corrections = jnp.exp(largest - most)
    total = (totals * corrections).sum(0)
    if sinks is not None:
        total += jnp.exp(sinks - most)
    # A row that sees nothing has no sum.
    total = jnp.where(total == 0, 1.0, total)
    return (sums * corrections[..., None]).sum(0) / total[..., None]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of a call.

    Attributes:
      call: the static arguments.
      slots: number of slots of a row.
      rows: heads of queries of a tile.
      block: slots of a block.
      splits: programs that share the blocks of a row.
      key_dim: D of the keys.
      value_dim: D of the values.
    """

    call: CacheCall
    slots: int
    rows: int
    block: int
    splits: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, call: CacheCall, cache: Cache) -> _Tiles:
        """Returns the tiles for a call's arrays."""
        batch, shared, group, _ = cache.query.shape
        block = block_size(call, cache.keys.shape, cache.values.shape, cache.keys.dtype.name)
        rows = _LEAST_ROWS
        while rows < min(group, _MOST_ROWS):
            rows *= 2
        programs = batch * shared * -(-group // rows)
        most = max(call.most_blocks(cache.slots, block) // 2, 1)
        splits = min(-(-_PROGRAMS // programs), most)
        dims = cache.keys.shape[3], cache.values.shape[3]
        return cls(call, cache.slots, rows, block, splits, *dims)


def _tile(tiles: _Tiles, query_ref: Any, keys_ref: Any, values_ref: Any, *refs: Any) -> None:
    """Sums up the blocks of one program: those at its own place and every `splits` from there."""
    newest_ref, reach_ref, first_ref, count_ref, sums_ref, largest_ref, totals_ref = refs
    newest, reach = newest_ref[0], reach_ref[0]
    first, count = first_ref[0], count_ref[0]
    total_blocks = -(-tiles.slots // tiles.block)
    own = pallas.program_id(0)
    query = load_rows(query_ref, tiles.key_dim)

    def add_block(i: Any, sums: tuple) -> tuple:
        mixed, largest, total = sums
        at = jax.lax.rem(first + own + i * tiles.splits, total_blocks) * tiles.block
        # The last block of a ring that blocks do not divide is read from an earlier slot on.
        begin = jnp.minimum(at, tiles.slots - tiles.block)
        keys = load_rows(keys_ref, tiles.key_dim, begin, tiles.block)
        values = load_rows(values_ref, tiles.value_dim, begin, tiles.block)
        slot = begin + jnp.arange(tiles.block)
        age = newest - slot
        age = jnp.where(age < 0, age + tiles.slots, age)
        visible = (age <= reach) & (slot >= at)
        logits, _ = logits_of(tiles.call.logit_cap, query, keys)
        logits = jnp.where(visible[None], logits, HIDDEN)
        new_largest = jnp.maximum(largest, logits.max(-1))
        correction = jnp.exp(largest - new_largest)
        exponentials = jnp.exp(logits - new_largest[:, None])
        total = total * correction + exponentials.sum(-1)
        mixed = mixed * correction[:, None] + dot(exponentials.astype(values.dtype), values)
        return mixed, new_largest, total

    zeros = jnp.zeros((tiles.rows, sums_ref.shape[-1]), jnp.float32)
    start = (
        zeros,
        jnp.full((tiles.rows,), HIDDEN, jnp.float32),
        jnp.zeros((tiles.rows,), jnp.float32),
    )
    steps = jax.lax.div(jnp.maximum(count - own + tiles.splits - 1, 0), tiles.splits)
    mixed, largest, total = jax.lax.fori_loop(0, steps, add_block, start)
    store_rows(sums_ref, mixed, tiles.value_dim)
    largest_ref[...] = largest
    totals_ref[...] = total
