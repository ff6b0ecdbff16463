# tests: wings/hlo/module.py
"""Reads shapes of arrays and tuples, given as HLO text."""

import numpy as np
import pytest

from lingvo_gshard.wings.hlo.module import Shape, numpy_name
from tests.hlo.parsing import parse_shape


def test_array_shape():
    assert parse_shape("f32[8,128]{1,0}") == Shape("f32", (8, 128), (1, 0))
    assert parse_shape("pred[]") == Shape("pred", (), ())
    assert parse_shape("bf16[<=8,2]").dimensions == (8, 2)
    assert parse_shape("f32[16,256]{1,0:T(*,128)}").tile == (1, 128)


def test_a_tpu_layout_has_tiles_and_a_memory_space():
    shape = parse_shape("bf16[8,32,256]{2,0,1:T(8,128)(2,1)S(1)}")
    assert (shape.layout, shape.tile, shape.space) == ((2, 0, 1), (8, 128), 1)
    assert parse_shape("u32[]{:S(2)}").space == 2
    assert parse_shape("u32[]{:S(2)}").tile == ()
    assert parse_shape("f32[]{:T(256)}").padding == 1


def test_nested_tuple_shapes():
    shape = parse_shape("((f32[2]{0:T(256)}, s8[3]{0}), /*index=1*/pred[4]{0}, token[])")
    assert [array.dtype for array in shape.arrays] == ["f32", "s8", "pred", "token"]
    assert shape.elements[0].elements[0].tile == (256,)
    assert (shape.size, shape.bytes) == (2 + 3 + 4 + 1, 8 + 3 + 4)


@pytest.mark.parametrize(
    ("text", "elements", "padded"),
    [
        ("f32[16,256]{1,0:T(8,128)}", 16 * 256, 16 * 256),
        ("f32[16,8]{1,0:T(8,128)}", 16 * 8, 16 * 128),
        ("f32[16,8]{0,1:T(8,128)}", 16 * 8, 128 * 8),
        ("bf16[3,5,100]{2,1,0:T(8,128)(2,1)}", 1500, 3 * 8 * 128),
        ("f32[100]{0:T(256)}", 100, 256),
    ],
)
def test_tiles_pad_the_minor_dimensions(text, elements, padded):
    shape = parse_shape(text)
    assert shape.size == elements
    assert shape.size * shape.padding == pytest.approx(padded)


@pytest.mark.parametrize(
    ("text", "size"),
    [("pred[3]", 3), ("s4[3]", 2), ("bf16[3]", 6), ("f8e4m3fn[3]", 3), ("c64[3]", 24)],
)
def test_shape_bytes(text, size):
    assert parse_shape(text).bytes == size


def test_dtypes_have_numpy_names():
    found = [numpy_name(name) for name in ("f32", "s8", "u16", "c64", "pred")]
    expected = [np.float32, np.int8, np.uint16, np.complex64, np.bool_]
    assert found == [np.dtype(each).name for each in expected]
    assert numpy_name("bf16") == "bfloat16"
    assert numpy_name("f8e4m3fn") == "float8_e4m3fn"
    assert numpy_name("token") == "token"
