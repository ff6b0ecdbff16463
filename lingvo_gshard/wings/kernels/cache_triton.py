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

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import pallas, pallas_triton
from lingvo_gshard.wings.kernels.attention_triton import capped
from lingvo_gshard.wings.kernels.cache_call import Cache, CacheCall
from lingvo_gshard.wings.kernels.call import HIDDEN, pad
from lingvo_gshard.wings.kernels.triton_rows import dot, load_rows, padded_dim, store_rows

# A head is one tile up to this size, padded to a power of two. Larger heads, which latent attention
# has, are divided into tiles of powers of two: 576 is 512 and 64.
_LARGEST_TILE = 256
_LARGEST_HEAD = 576
# Triton multiplies no matrices with fewer rows.
_LEAST_ROWS = 16
_MOST_ROWS = 64
_BLOCK = 64
# Programs that keep an H100 busy: two for each of its 132 multiprocessors.
_PROGRAMS = 264


def obstacle(call: CacheCall, query: tuple, keys: tuple, values: tuple, dtype: str) -> str:
    """Returns why the kernel cannot compute a call; "" if it can. See cache_tpu.py."""
    del call, query
    if dtype not in ("bfloat16", "float16", "float32"):
        return f"the kernel of a cache computes 16-bit floats and float32, not {dtype}"
    for dim in (keys[3], values[3]):
        if dim > _LARGEST_HEAD:
            return f"the kernel of a cache has heads of at most {_LARGEST_HEAD}, not {dim}"
        if dim > _LARGEST_TILE and dim % _LEAST_ROWS:
            return f"heads of {dim} are not a multiple of {_LEAST_ROWS}"
    if keys[2] < _LEAST_ROWS:
        return f"{keys[2]} slots are fewer than the {_LEAST_ROWS} of the smallest block"
    return ""


def block_size(call: CacheCall, keys: tuple, values: tuple, dtype: str) -> int:
    """Returns the slots of a block. See cache_tpu.py."""
    del call
    is_large = jnp.dtype(dtype).itemsize * max(keys[3], values[3]) > 256
    # Triton computes with powers of two.
    return min(_BLOCK // 2 if is_large else _BLOCK, 1 << (keys[2].bit_length() - 1))


def forward(call: CacheCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the output [B,N,D] of one new token of each row. See cache_tpu.py."""
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
    query = _load(query_ref, tiles.key_dim)

    def add_block(i: Any, sums: tuple) -> tuple:
        mixed, largest, total = sums
        at = jax.lax.rem(first + own + i * tiles.splits, total_blocks) * tiles.block
        # The last block of a ring that blocks do not divide is read from an earlier slot on.
        begin = jnp.minimum(at, tiles.slots - tiles.block)
        keys = values = _load(keys_ref, tiles.key_dim, begin, tiles.block)
        if tiles.call.has_values:
            values = _load(values_ref, tiles.value_dim, begin, tiles.block)
        slot = begin + jnp.arange(tiles.block)
        age = newest - slot
        age = jnp.where(age < 0, age + tiles.slots, age)
        visible = (age <= reach) & (slot >= at)
        products = sum(dot(q, k.T) for q, k in zip(query, keys, strict=True))
        logits, _ = capped(tiles.call.logit_cap, products)
        logits = jnp.where(visible[None], logits, HIDDEN)
        new_largest = jnp.maximum(largest, logits.max(-1))
        correction = jnp.exp(largest - new_largest)
        exponentials = jnp.exp(logits - new_largest[:, None])
        total = total * correction + exponentials.sum(-1)
        weights = exponentials.astype(values[0].dtype)
        mixed = tuple(
            part * correction[:, None] + dot(weights, x)
            for part, x in zip(mixed, values, strict=True)
        )
        return mixed, new_largest, total

    start = (
        tuple(jnp.zeros((tiles.rows, size), jnp.float32) for _, size in _parts(tiles.value_dim)),
        jnp.full((tiles.rows,), HIDDEN, jnp.float32),
        jnp.zeros((tiles.rows,), jnp.float32),
    )
    steps = jax.lax.div(jnp.maximum(count - own + tiles.splits - 1, 0), tiles.splits)
    mixed, largest, total = jax.lax.fori_loop(0, steps, add_block, start)
    if len(mixed) == 1:
        store_rows(sums_ref, mixed[0], tiles.value_dim)
    else:
        for part, (begin, size) in zip(mixed, _parts(tiles.value_dim), strict=True):
            sums_ref[:, pallas.ds(begin, size)] = part
    largest_ref[...] = largest
    totals_ref[...] = total


def _parts(dim: int) -> list[tuple[int, int]]:
    """Returns the first index and the size of each tile of a head."""
    if dim <= _LARGEST_TILE:
        return [(0, 1 << (dim - 1).bit_length())]
    sizes = [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _load(ref: Any, dim: int, first: Any = None, size: int = 0) -> list[Any]:
    """Returns the tiles of rows of an array: all rows, or `size` rows from the first on."""
    parts = _parts(dim)
    if len(parts) == 1:
        return [load_rows(ref, dim, first, size)]
    rows = slice(None) if first is None else pallas.ds(first, size)
    return [ref[rows, pallas.ds(*part)] for part in parts]
