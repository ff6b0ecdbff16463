"""Shapes in HLO text: element type, dimensions, layout with its tiles, memory space."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_BITS = re.compile(r"\d+")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dimensions>[^\]]*)\](?:\{(?P<layout>[^}]*)\})?")
_TILE = re.compile(r"\(([\d,*]*)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")

# Short names of HLO whose NumPy names are longer.
_NAMES = {"pred": "bool", "bf16": "bfloat16", "f": "float", "s": "int", "u": "uint", "c": "complex"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's type, or that of a tuple where `elements` is not None.

    layout: dimensions from minor to major; None where the text gives none.
    tile: the first tile, of the most minor dimensions, major before minor.
    space: the memory it lies in; 0 is the device's main memory.
    """

    dtype: str
    dimensions: tuple[int, ...] = ()
    layout: tuple[int, ...] | None = None
    tile: tuple[int, ...] = ()
    space: int = 0
    elements: tuple[Shape, ...] | None = None

    @functools.cached_property
    def arrays(self) -> tuple[Shape, ...]:
        """The arrays in it, of nested tuples too."""
        if self.elements is None:
            return (self,)
        return tuple(array for element in self.elements for array in element.arrays)

    @functools.cached_property
    def size(self) -> int:
        """The number of elements; of a tuple, of all its arrays."""
        if self.elements is None:
            return math.prod(self.dimensions)
        return sum(array.size for array in self.arrays)

    @functools.cached_property
    def bytes(self) -> int:
        """What its elements take, without padding."""
        return sum(-(-array.size * element_bits(array.dtype) // 8) for array in self.arrays)

    @functools.cached_property
    def padding(self) -> float:
        """How many times its elements the array takes in memory, its dimensions filled to tiles."""
        if not self.tile or not self.size or not self.dimensions:
            return 1.0
        order = self.layout or tuple(reversed(range(len(self.dimensions))))
        factor = 1.0
        for dimension, tile in zip(order, reversed(self.tile), strict=False):
            size = self.dimensions[dimension]
            factor *= -(-size // tile) * tile / size
        return factor


def element_bits(dtype: str) -> int:
    """Returns the bits of an element; 0 of a token."""
    if dtype == "pred":
        return 8
    bits = _BITS.search(dtype)
    return int(bits[0]) if bits else 0


def numpy_name(dtype: str) -> str:
    """Returns what NumPy calls a type: float32 for f32, bfloat16 for bf16, float8_e4m3fn."""
    if dtype in _NAMES:
        return _NAMES[dtype]
    match = re.fullmatch(r"([fsuc])(\d+)(\w*)", dtype)
    if not match:
        return dtype
    letter, bits, rest = match.groups()
    return f"{_NAMES[letter]}{bits}" + (f"_{rest}" if rest else "")


@functools.lru_cache(maxsize=2**16)
def parse_shape(text: str) -> Shape:
    """Returns the shape written as `f32[8,128]{1,0:T(8,128)S(1)}` or `(f32[], (s32[2], u8[]))`.

    Raises ValueError if it is neither.
    """
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return Shape("tuple", elements=tuple(parse_shape(part) for part in split(text[1:-1])))
    match = _ARRAY.match(text)
    if not match:
        raise ValueError(f"HLO text: {text!r} is no shape")
    sizes = match["dimensions"].replace("<=", "").replace("?", "0")
    dimensions = tuple(int(size) for size in sizes.split(",") if size)
    layout, _, rest = (match["layout"] or "").partition(":")
    order = tuple(int(index) for index in layout.split(",") if index)
    space = _SPACE.search(rest)
    return Shape(
        match["dtype"],
        dimensions,
        order if match["layout"] is not None else None,
        _tile(rest),
        int(space[1]) if space else 0,
    )


def split(text: str) -> list[str]:
    """Returns the parts between commas that stand in no brackets and no quotes."""
    parts, depth, start = [], 0, 0
    for match in _MARK.finditer(text):
        mark = match[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        elif mark == "," and not depth:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    last = text[start:].strip()
    return [*parts, last] if last else parts


_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{}\]),]')


def _tile(text: str) -> tuple[int, ...]:
    """The first tile of a layout; a dimension `*` is taken with the next, and counts as 1."""
    tile = _TILE.search(text.split("T", 1)[1]) if text.startswith("T") else None
    return tuple(1 if n == "*" else int(n) for n in tile[1].split(",") if n) if tile else ()
