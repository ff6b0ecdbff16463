"""Attention over a cache on TPUs, in Pallas: reads the visible blocks of slots, and no others.

Running sums over blocks of keys, as in FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1),
for one token of each row. jax's own kernels for paged caches know neither rings, whose first block
has slots of older texts, nor sinks.
"""

from __future__ import annotations

import functools
from typing import Any

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import pallas, pallas_tpu
from lingvo_gshard.wings.kernels.cache_call import Cache, CacheCall
from lingvo_gshard.wings.kernels.call import HIDDEN

_LANES = 128
# Keys and values of a block. To read fewer bytes takes less time than a step of the grid takes to
# begin.
_BLOCK_BYTES = 2**21
# Two buffers of as many bytes fit into the vector memory that a kernel has on every TPU.
_MOST_BYTES = 2**22


def obstacle(call: CacheCall, query: tuple, keys: tuple, values: tuple, dtype: str) -> str:
    """Returns why the kernel cannot compute queries [B,N,D] and a cache [B,N,K,D]; "" if it can."""
    del call, query
    if dtype not in ("bfloat16", "float32"):
        return f"the kernel of a cache computes bfloat16 and float32, not {dtype}"
    if _slot_bytes(keys, values, dtype) * min(_unit(keys), keys[2]) > _MOST_BYTES:
        return (
            f"blocks of {_unit(keys)} slots with {keys[1]} heads of keys of {keys[3]} do not fit "
            "into the vector memory"
        )
    return ""


def block_size(call: CacheCall, keys: tuple, values: tuple, dtype: str) -> int:
    """Returns the slots of a block: the most that divide the slots of a row [B,N,K,D] and fit.

    A window reads blocks that are no larger than it.
    """
    unit = _unit(keys)
    most = max(_BLOCK_BYTES // _slot_bytes(keys, values, dtype) // unit, 1)
    if call.window:
        most = min(most, -(-call.window // unit))
    units = keys[2] // unit
    return unit * max(n for n in range(1, units + 1) if units % n == 0 and n <= most)


def _unit(keys: tuple) -> int:
    """Returns the number that the slots of a block are a multiple of, or all slots of a row."""
    return keys[2] if keys[2] % _LANES else _LANES


def _slot_bytes(keys: tuple, values: tuple, dtype: str) -> int:
    """Returns the bytes of the keys and values of a slot, with the padding of their tiles."""
    dims = sum(-(-shape[3] // _LANES) * _LANES for shape in (keys, values))
    return keys[1] * dims * jnp.dtype(dtype).itemsize


def forward(call: CacheCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the output [B,N,D] of one new token of each row, from the arrays of `Cache.of`."""
    cache = Cache.of(call, operands)
    batch, shared, group, _ = cache.query.shape
    value_dim = cache.values.shape[3]
    block = block_size(call, cache.keys.shape, cache.values.shape, cache.keys.dtype.name)
    total = cache.slots // block
    first, count = cache.blocks(block)
    steps = call.most_blocks(cache.slots, block)

    def of_row(dim: int) -> Any:
        return pallas.BlockSpec((None, shared, group, dim), lambda b, j, *_: (b, 0, 0, 0))

    def of_slots(dim: int) -> Any:
        def place(b: Any, j: Any, newest: Any, reach: Any, first: Any, count: Any) -> tuple:
            # Beyond the visible blocks the last one stays: nothing is fetched.
            j = jnp.maximum(jnp.minimum(j, count[b] - 1), 0)
            return b, 0, jax.lax.rem(first[b] + j, total), 0

        return pallas.BlockSpec((None, shared, block, dim), place)

    def in_main_memory(x: jax.Array) -> Any:
        # Else XLA would copy a small cache to the vector memory first, with its hidden slots.
        return x if interpret else pallas_tpu.with_memory_space_constraint(x, pallas_tpu.HBM)

    inputs = [(cache.query, of_row(cache.query.shape[3]))]
    arrays = [cache.keys, *([cache.values] if call.has_values else [])]
    inputs += [(in_main_memory(x), of_slots(x.shape[3])) for x in arrays]
    if cache.sinks is not None:
        whole = pallas.BlockSpec((shared, group, 1), lambda b, j, *_: (0, 0, 0))
        inputs.append((cache.sinks[..., None], whole))
    mixed = pallas.pallas_call(
        functools.partial(_block, call, cache.slots, block, total),
        grid_spec=pallas_tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, steps),
            in_specs=[spec for _, spec in inputs],
            out_specs=of_row(value_dim),
            scratch_shapes=[
                pallas_tpu.VMEM((shared, group, value_dim), jnp.float32),
                pallas_tpu.VMEM((shared, group, 1), jnp.float32),
                pallas_tpu.VMEM((shared, group, 1), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, shared, group, value_dim), cache.query.dtype),
        compiler_params=pallas_tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="cache_attention",
    )(cache.newest, cache.reach, first, count, *(x for x, _ in inputs))
    return (mixed.reshape(batch, shared * group, value_dim),)


def _block(call: CacheCall, slots: int, block: int, total: int, *refs: Any) -> None:
    """Adds a block of slots to the running sums of a row, and writes the row's output."""
    newest_ref, reach_ref, first_ref, count_ref, query_ref, keys_ref, *others = refs
    *others, mixed_ref, sum_ref, largest_ref, total_ref = others
    sinks_ref = others.pop() if call.has_sinks else None
    values_ref = others[0] if call.has_values else keys_ref
    row, j = pallas.program_id(0), pallas.program_id(1)

    @pallas.when(j == 0)
    def _begin() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)
        if sinks_ref is None:
            largest_ref[...] = jnp.full_like(largest_ref, HIDDEN)
            total_ref[...] = jnp.zeros_like(total_ref)
        else:
            largest_ref[...] = sinks_ref[...]
            total_ref[...] = jnp.ones_like(total_ref)

    @pallas.when(j < count_ref[row])
    def _add() -> None:
        keys, values = keys_ref[...], values_ref[...]
        logits = _product("ngd,nkd->ngk", query_ref[...], keys)
        if call.logit_cap:
            logits = call.logit_cap * jnp.tanh(logits / call.logit_cap)
        start = jax.lax.rem(first_ref[row] + j, total) * block
        slot = start + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        age = newest_ref[0] - slot
        age = jnp.where(age < 0, age + slots, age)
        logits = jnp.where(age <= reach_ref[row], logits, HIDDEN)
        before = largest_ref[...]
        largest = jnp.maximum(before, logits.max(-1, keepdims=True))
        correction = jnp.exp(before - largest)
        exponentials = jnp.exp(logits - largest)
        total_ref[...] = total_ref[...] * correction + exponentials.sum(-1, keepdims=True)
        mixed = _product("ngk,nkd->ngd", exponentials.astype(values.dtype), values)
        sum_ref[...] = sum_ref[...] * correction + mixed
        largest_ref[...] = largest

    @pallas.when(j == pallas.num_programs(1) - 1)
    def _end() -> None:
        # A row that sees nothing has no sum.
        divisor = jnp.where(total_ref[...] == 0, 1.0, total_ref[...])
        mixed_ref[...] = (sum_ref[...] / divisor).astype(mixed_ref.dtype)


def _product(equation: str, a: Any, b: Any) -> Any:
    """Returns a float32 product over the heads. By default a TPU would round float32 to 8 bits."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)
