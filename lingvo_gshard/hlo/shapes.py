"""Shapes of HLO values: element type, dimensions, layout with its tiles, memory space."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

from lingvo_gshard.hlo.messages import ELEMENT_TYPES, TUPLE, ShapeProto

# HLO's short names of element types -> the beginning of NumPy's.
_NUMPY_NAMES = {
    "pred": "bool",
    "bf16": "bfloat16",
    "f": "float",
    "s": "int",
    "u": "uint",
    "c": "complex",
}
_FIRST_NUMBER = re.compile(r"\d+")
# XLA writes the dimension `*` of a tile, which is combined with the next one, as this number.
_COMBINED = -(2**63)
# Stands for types of newer compilers. Their bits are unknown.
_UNKNOWN = "opaque_type"


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of an array, or of a tuple if `elements` is not None.

    Attributes:
      dtype: HLO's name of the element type, such as "f32"; "tuple" for a tuple.
      dimensions: sizes, major first as the program states them.
      layout: dimension numbers from minor to major; None if the program does not fix them.
      tile: sizes of the first tile, over the most minor dimensions, major first.
      space: the memory that holds the array; 0 is the device's main memory.
      elements: shapes of a tuple's elements.
    """

    dtype: str
    dimensions: tuple[int, ...] = ()
    layout: tuple[int, ...] | None = None
    tile: tuple[int, ...] = ()
    space: int = 0
    elements: tuple[Shape, ...] | None = None

    @functools.cached_property
    def arrays(self) -> tuple[Shape, ...]:
        """All arrays of the shape, those of nested tuples included."""
        if self.elements is None:
            return (self,)
        return tuple(array for element in self.elements for array in element.arrays)

    @functools.cached_property
    def size(self) -> int:
        """The number of elements; of a tuple, the sum over its arrays."""
        if self.elements is None:
            return math.prod(self.dimensions)
        return sum(array.size for array in self.arrays)

    @functools.cached_property
    def bytes(self) -> int:
        """The bytes of all elements, without padding."""
        return sum(-(-array.size * element_bits(array.dtype) // 8) for array in self.arrays)

    @functools.cached_property
    def padding(self) -> float:
        """The array's size in memory, where tiles pad its dimensions, over its own size."""
        if not self.tile or not self.size or not self.dimensions:
            return 1.0
        order = self.layout or tuple(reversed(range(len(self.dimensions))))
        factor = 1.0
        for dimension, tile in zip(order, reversed(self.tile), strict=False):
            size = self.dimensions[dimension]
            factor *= -(-size // tile) * tile / size
        return factor


def shape_from_proto(proto: Any) -> Shape:
    """Returns the shape that a proto describes."""
    return _shape_from_bytes(proto.SerializeToString())


@functools.lru_cache(maxsize=2**16)
def _shape_from_bytes(serialized: bytes) -> Shape:
    # A program repeats its shapes, tuples of hundreds of arrays among them.
    proto = ShapeProto.FromString(serialized)
    if proto.element_type == TUPLE:
        return Shape("tuple", elements=tuple(map(shape_from_proto, proto.tuple_shapes)))
    layout = proto.layout
    tile = layout.tiles[0].dimensions if layout.tiles else ()
    return Shape(
        dtype=ELEMENT_TYPES.get(proto.element_type, _UNKNOWN),
        dimensions=tuple(max(size, 0) for size in proto.dimensions),
        layout=tuple(layout.minor_to_major) if proto.HasField("layout") else None,
        tile=tuple(1 if size == _COMBINED else size for size in tile),
        space=layout.memory_space,
    )


def element_bits(dtype: str) -> int:
    """Returns the bits of one element; 0 for a token."""
    if dtype == "pred":
        return 8
    bits = _FIRST_NUMBER.search(dtype)
    return int(bits[0]) if bits else 0


def numpy_name(dtype: str) -> str:
    """Returns NumPy's name of a type: "float32" for "f32", "bfloat16" for "bf16"."""
    if dtype in _NUMPY_NAMES:
        return _NUMPY_NAMES[dtype]
    match = re.fullmatch(r"([fsuc])(\d+)(\w*)", dtype)
    if not match:
        return dtype
    letter, bits, rest = match.groups()
    return f"{_NUMPY_NAMES[letter]}{bits}" + (f"_{rest}" if rest else "")
