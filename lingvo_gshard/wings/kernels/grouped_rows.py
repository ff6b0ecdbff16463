"""Functions of the rows of groups, for GPUs in Pallas: activations, and roundings to 8 bits.

XLA would compute all rows that an array has room for. A kernel computes the rows that there are:
programs for other rows end before they read anything.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import msgspec

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import pallas, pallas_triton
from lingvo_gshard.wings.kernels.activation_call import ActivationCall
from lingvo_gshard.wings.kernels.triton_rows import Range, load_tile, store_tile

# Elements of a tile, and the most columns of it. A thread has 32 elements of each array.
_ELEMENTS, _MOST_COLUMNS, _WARPS = 4096, 512, 4
# The bits of a float32: of its exponent, the exponent's lowest bit, and of the mantissa of 1.75.
_EXPONENT, _ONE, _MANTISSA_OF_LARGEST = 0x7F800000, 0x00800000, 0x00600000


class RowsCall(msgspec.Struct, frozen=True):
    """The static arguments of a function of rows.

    Attributes:
      activation: computes a row from the same row of each hidden array; None for no activation.
      dtype: the type of 8 bits to round to, float8_e4m3fn or float8_e5m2; empty for no rounding.
      block: the number of consecutive elements that share a scale; 0: all elements of a row.
    """

    activation: ActivationCall | None = None
    dtype: str = ""
    block: int = 0

    def scale_count(self, columns: int) -> int:
        """Returns the number of scales of a row of `columns` elements."""
        return -(-columns // self.block) if self.block else 1


def forward(call: RowsCall, sizes_E: jax.Array, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Returns the rows [R,H] and, if they are rounded, float32 scales [R,1] or [R,H/block].

    Scales are the powers of two of wings/low_precision/rounding.py. Rows after the last group are
    undefined.

    Args:
      sizes_E: int32, the number of rows of each group.
      *arrays: the array [R,H], or the hidden arrays that the activation takes.
    """
    count, columns = arrays[0].shape
    results = [jax.ShapeDtypeStruct((count, columns), call.dtype or arrays[0].dtype)]
    if call.dtype:
        results.append(jax.ShapeDtypeStruct((count, call.scale_count(columns)), jnp.float32))
    body = functools.partial(_rows_tile, call, len(arrays))
    return _run(body, "rows_of_groups", call.block, sizes_E, arrays, results, interpret)


def gradient(
    call: RowsCall,
    sizes_E: jax.Array,
    d_rows_RH: jax.Array,
    *hidden_RH: jax.Array,
    interpret: bool = False,
) -> Any:
    """Returns the gradient [R,H] of each hidden array, and the activated rows [R,H].

    Rows after the last group are undefined.
    """
    result = jax.ShapeDtypeStruct(d_rows_RH.shape, d_rows_RH.dtype)
    arrays = (d_rows_RH, *hidden_RH)
    body = functools.partial(_gradient_tile, call, len(arrays))
    results = [result] * len(arrays)
    return _run(body, "gradient_of_rows", 0, sizes_E, arrays, results, interpret)


def _run(
    body: Any,
    name: str,
    block: int,
    sizes_E: jax.Array,
    arrays: tuple,
    results: list,
    interpret: bool,
) -> tuple:
    """Returns the results of a kernel whose programs compute whole rows, tile by tile."""
    columns = block or min(1 << (arrays[0].shape[1] - 1).bit_length(), _MOST_COLUMNS)
    rows = _ELEMENTS // columns
    found = pallas.pallas_call(
        functools.partial(body, rows, columns),
        grid=(-(-arrays[0].shape[0] // rows),),
        out_shape=results,
        compiler_params=pallas_triton.CompilerParams(num_warps=_WARPS, num_stages=2),
        interpret=interpret,
        name=name,
    )(sizes_E.sum(keepdims=True, dtype=jnp.int32), *arrays)
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of the rows that one program computes.

    Attributes:
      size: columns of a tile.
      columns: columns of the arrays.
    """

    rows: Range
    size: int
    columns: int

    def at(self, step: Any) -> Range:
        """Returns the columns of a tile."""
        return Range.of(step * self.size, self.size, self.columns)

    def load(self, refs: Any, step: Any) -> list:
        """Returns a tile of each array."""
        return [load_tile(ref, (), self.rows, self.at(step)) for ref in refs]

    def store(self, ref: Any, step: Any, values: Any) -> None:
        """Writes a tile of an array."""
        store_tile(ref, (), self.rows, self.at(step), values)

    def each(self, body: Any, start: Any = 0) -> Any:
        """Returns the last of the values that a function maps a tile and the value before to."""
        return jax.lax.fori_loop(0, -(-self.columns // self.size), body, start)


def _for_rows(count_ref: Any, rows: int, size: int, columns: int, compute: Any) -> None:
    """Calls `compute` with the tiles of a program whose rows exist."""
    first, count = pallas.program_id(0) * rows, count_ref[0]

    @pallas.when(first < count)
    def _() -> None:
        compute(_Tiles(Range.of(first, rows, count), size, columns))


def _rows_tile(
    call: RowsCall, operands: int, rows: int, size: int, count_ref: Any, *refs: Any
) -> None:
    array_refs, (rows_ref, *scale_refs) = refs[:operands], refs[operands:]

    def values(tiles: _Tiles, step: Any) -> Any:
        loaded = tiles.load(array_refs, step)
        return call.activation(*loaded) if call.activation else loaded[0]

    def largest(tiles: _Tiles, step: Any) -> Any:
        """Returns the largest magnitude of each row of a tile, as bits. NaN has larger bits."""
        wide = values(tiles, step).astype(jnp.float32)
        # Zero has a positive activation in some cases.
        magnitudes = jnp.where(tiles.at(step).is_inside[None], jnp.abs(wide), 0.0)
        return jnp.max(jax.lax.bitcast_convert_type(magnitudes, jnp.int32), axis=1)

    def store_rounded(tiles: _Tiles, step: Any, scale_bits: Any) -> None:
        # A power of two and its inverse have exponents of the same sum.
        inverse = jax.lax.bitcast_convert_type(
            jnp.where(scale_bits < _EXPONENT, 254 * _ONE - scale_bits, 0), jnp.float32
        )
        limit = float(jnp.finfo(call.dtype).max)
        scaled = values(tiles, step).astype(jnp.float32) * inverse[:, None]
        tiles.store(rows_ref, step, jnp.clip(scaled, -limit, limit))

    def store_scale(tiles: _Tiles, index: Any, scale_bits: Any) -> None:
        scale = jax.lax.bitcast_convert_type(scale_bits, jnp.float32)[:, None]
        column = Range.of(index, 1, scale_refs[0].shape[1])
        store_tile(scale_refs[0], (), tiles.rows, column, scale)

    def compute(tiles: _Tiles) -> None:
        def store(step: Any, carry: Any) -> Any:
            if not call.dtype:
                tiles.store(rows_ref, step, values(tiles, step))
            elif call.block:
                bits = _scale_bits(largest(tiles, step), call.dtype)
                store_scale(tiles, step, bits)
                store_rounded(tiles, step, bits)
            else:
                store_rounded(tiles, step, row_bits)
            return carry

        if call.dtype and not call.block:
            most = tiles.each(
                lambda step, found: jnp.maximum(found, largest(tiles, step)),
                jnp.zeros(rows, jnp.int32),
            )
            row_bits = _scale_bits(most, call.dtype)
            store_scale(tiles, 0, row_bits)
        tiles.each(store)

    _for_rows(count_ref, rows, size, rows_ref.shape[1], compute)


def _scale_bits(largest_bits: Any, dtype: str) -> Any:
    """Returns the bits of the smallest powers of two that bring magnitudes into a type's range.

    The largest number of both types is 1.75 times a power of two. Infinity and NaN give infinity.

    Args:
      largest_bits: int32, the bits of the magnitudes.
    """
    exponent = jnp.finfo(dtype).maxexp - 1
    bits = largest_bits + (_ONE - 1 - _MANTISSA_OF_LARGEST)
    bits = jnp.maximum((bits & _EXPONENT) - exponent * _ONE, _ONE)
    return jnp.where(largest_bits < _EXPONENT, bits, _EXPONENT)


def _gradient_tile(
    call: RowsCall, operands: int, rows: int, size: int, count_ref: Any, *refs: Any
) -> None:
    (d_rows_ref, *hidden_refs), result_refs = refs[:operands], refs[operands:]
    activation = call.activation
    assert activation is not None

    def compute(tiles: _Tiles) -> None:
        def store(step: Any, carry: Any) -> Any:
            d_rows, *hidden = tiles.load([d_rows_ref, *hidden_refs], step)
            found = activation.with_gradient(d_rows.astype(jnp.float32), *hidden)
            for ref, each in zip(result_refs, found, strict=True):
                tiles.store(ref, step, each)
            return carry

        tiles.each(store)

    _for_rows(count_ref, rows, size, d_rows_ref.shape[1], compute)
