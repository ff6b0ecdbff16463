"""Compares products of factors rounded to 8 bits, and their gradients, with NumPy."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers import products
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.low_precision.rounding import ROUNDINGS

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}

# Equation, shape of x, and shape of the weight.
PRODUCTS = [
    ("BLM,MH->BLH", (2, 5, 8), (8, 6)),
    ("BLM,MND->BLND", (2, 3, 8), (8, 2, 5)),
    ("BLND,NDM->BLM", (2, 3, 2, 4), (2, 4, 5)),
    ("EGCM,EMH->EGCH", (3, 2, 4, 8), (3, 8, 6)),
]
# Dimensions that are no multiples of a block, and several blocks.
LARGE = ("BLM,MH->BLH", (1, 300, 150), (150, 270))


def power_of_two(largest: np.ndarray, number_format: np.dtype) -> np.ndarray:
    """Returns the smallest power of two by which the largest magnitude fits into a type."""
    scale = np.full(largest.shape, 2.0**-126)
    while np.any(too_small := largest > LARGEST[number_format] * scale):
        scale = np.where(too_small, 2 * scale, scale)
    return scale


def rounded(x: np.ndarray, number_format: np.dtype) -> np.ndarray:
    """Returns a tensor rounded with one scale."""
    x = x.astype(np.float64)
    scale = power_of_two(np.abs(x).max(), number_format)
    return (x / scale).astype(np.float32).astype(number_format).astype(np.float64) * scale


def rounded_blocks(x: np.ndarray, axes: tuple[int, ...], most: int = 128) -> np.ndarray:
    """Returns a tensor rounded in blocks of up to `most` along some axes and of 1 along others."""
    result = np.empty(x.shape)
    steps = [most if axis in axes else 1 for axis in range(x.ndim)]
    blocks = [-(-size // step) for size, step in zip(x.shape, steps, strict=True)]
    for index in np.ndindex(*blocks):
        part = tuple(slice(i * s, (i + 1) * s) for i, s in zip(index, steps, strict=True))
        result[part] = rounded(x[part], E4M3)
    return result


def rounded_rows(x: np.ndarray, axes: tuple[int, ...], number_format=None) -> np.ndarray:
    """Returns a tensor rounded to multiples of 1/127 of the largest magnitude along axes.

    Args:
      x: the tensor.
      axes: the dimensions that share a scale.
      number_format: a floating type to round to instead, with scales that are powers of two.
    """
    largest = np.abs(x).max(axes, keepdims=True)
    if number_format is not None:
        scale = power_of_two(largest.astype(np.float64), number_format)
        return (x / scale).astype(np.float32).astype(number_format).astype(np.float64) * scale
    scale = largest / np.float32(127)
    return np.rint(x / np.where(scale > 0, scale, 1)) * scale.astype(np.float64)


def expected(rounding, equation, x, w, dz):
    """Returns the product and both gradients, by NumPy alone."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    of_x, of_w = f"{output},{right}->{left}", f"{left},{output}->{right}"
    if rounding == "fp8":
        x, w, dz = rounded(x, E4M3), rounded(w, E4M3), rounded(dz, E5M2)
        sums = np.einsum(equation, x, w), np.einsum(of_x, dz, w), np.einsum(of_w, x, dz)
        return sums
    if rounding in ("int8", "fp8_by_rows"):
        forward, backward = (E4M3, E5M2) if rounding == "fp8_by_rows" else (None, None)
        in_w = tuple(index for index, letter in enumerate(right) if letter not in output)
        in_x = tuple(index for index, letter in enumerate(left) if letter not in output)
        in_z = tuple(index for index, letter in enumerate(output) if letter not in left)
        of_z = tuple(index for index, letter in enumerate(right) if letter not in left)
        return (
            np.einsum(equation, rounded_rows(x, in_x, forward), rounded_rows(w, in_w, forward)),
            np.einsum(of_x, rounded_rows(dz, in_z, backward), rounded_rows(w, of_z, forward)),
            np.einsum(of_w, x.astype(np.float64), dz.astype(np.float64)),
        )
    if rounding == "mxfp8":

        def product(equation, x, y):
            inputs, result = equation.split("->")
            first, second = inputs.split(",")
            last = [c for c in first if c in second and c not in result][-1]
            factors = (
                rounded_blocks(t, (c.index(last),), 32) for t, c in ((x, first), (y, second))
            )
            return np.einsum(equation, *factors)

        of_w = f"{output},{left}->{right}"
        return product(equation, x, w), product(of_x, dz, w), product(of_w, dz, x)
    # One product, BLM,MH->BLH: sums over M, H, and B and L.
    w = rounded_blocks(w, (0, 1))
    of_weight = rounded_blocks(x, (1,)), rounded_blocks(dz, (1,))
    if rounding == "fp8_blocks_by_rows":
        of_weight = x.astype(np.float64), dz.astype(np.float64)
    return (
        np.einsum(equation, rounded_blocks(x, (2,)), w),
        np.einsum(of_x, rounded_blocks(dz, (2,)), w),
        np.einsum(of_w, *of_weight),
    )


def computed(rounding, equation, x, w, dz):
    """Returns the product and both gradients of `products.multiply`."""
    found = ROUNDINGS[rounding.removesuffix("_by_rows")]
    fields = {"rounding": found.by_rows if rounding.endswith("_by_rows") else found}
    with context.scope(True), context.override_extension(products.ProductContext, **fields):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            z = products.multiply(equation, x, w)
        return z, *tape.gradient(z, [x, w], dz)


def arrays(equation, shape_x, shape_w, dtype=ml_dtypes.bfloat16):
    """Returns x, w and the product's gradient, exact in a type and of very different sizes."""
    rng = np.random.default_rng(0)
    shape_z = np.einsum(equation, np.zeros(shape_x), np.zeros(shape_w)).shape
    drawn = [
        rng.normal(size=shape) * 2.0 ** rng.integers(-9, 3, shape) * size
        for shape, size in ((shape_x, 3.0), (shape_w, 0.02), (shape_z, 1e-6))
    ]
    return [x.astype(dtype).astype(np.float32) for x in drawn]


CASES = [
    *(
        (rounding, *product)
        for rounding in ("fp8", "fp8_by_rows", "mxfp8", "int8")
        for product in PRODUCTS
    ),
    *(
        (rounding, *LARGE)
        for rounding in ("fp8", "fp8_blocks", "fp8_blocks_by_rows", "mxfp8", "int8")
    ),
]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("rounding", "equation", "shape_x", "shape_w"), CASES)
def test_products_and_gradients_are_those_of_rounded_factors(
    rounding, equation, shape_x, shape_w, is_compiled
):
    # Numbers with few bits may lie halfway between two multiples of an int8 scale.
    dtype = np.float32 if rounding == "int8" else ml_dtypes.bfloat16
    values = arrays(equation, shape_x, shape_w, dtype)
    compute = tf.function(computed, jit_compile=True) if is_compiled else computed
    found = compute(rounding, equation, *map(tf.constant, values))
    for name, one, other in zip(
        ("product", "dx", "dw"), found, expected(rounding, equation, *values), strict=True
    ):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one / scale, other / scale, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_rounded_factors_are_exact_in_bfloat16(rounding):
    """A wider type changes nothing but the rounding of the sum."""
    equation, shape_x, shape_w = PRODUCTS[0]
    values = arrays(equation, shape_x, shape_w)
    # Outside of programs, CPUs with instructions for bfloat16 round partial sums.
    compiled = tf.function(computed, jit_compile=True)
    wide = compiled(rounding, equation, *map(tf.constant, values))
    narrow = compiled(rounding, equation, *(tf.constant(x, tf.bfloat16) for x in values))
    for one, other in zip(wide, narrow, strict=True):
        assert other.dtype == tf.bfloat16
        np.testing.assert_allclose(one, tf.cast(other, tf.float32), rtol=2**-7, atol=1e-12)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_zeros_and_tiny_numbers_give_zeros_or_tiny_numbers(rounding, dtype):
    x = tf.zeros([1, 4, 8], dtype)
    w = tf.fill([8, 3], tf.constant(1e-38, dtype))
    for result in computed(rounding, "BLM,MH->BLH", x, w, tf.zeros([1, 4, 3], dtype)):
        np.testing.assert_array_equal(tf.cast(result, tf.float32), 0.0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_overflow_is_not_hidden(rounding, bad, is_compiled):
    x, w, dz = (np.ones(shape, np.float32) for shape in ((1, 4, 8), (8, 3), (1, 4, 3)))
    compute = tf.function(computed, jit_compile=True) if is_compiled else computed
    x[0, 1, 2] = bad
    z, dx, dw = compute(rounding, "BLM,MH->BLH", *map(tf.constant, (x, w, dz)))
    assert not np.any(np.isfinite(z[0, 1])) and not np.all(np.isfinite(dw))
    assert np.all(np.isfinite(dx))


def test_largest_numbers_are_saturated():
    """449 is beyond e4m3, which has no infinity, so that its scale is 2."""
    for largest, fits in ((448.0, 448.0), (449.0, 448.0), (900.0, 896.0)):
        x, w = tf.fill([1, 1, 1], largest), tf.ones([1, 1])
        z, _, _ = computed("fp8", "BLM,MH->BLH", x, w, tf.ones([1, 1, 1]))
        assert z.numpy().item() == fits


def test_unrounded_products_stay_as_they_are():
    equation, shape_x, shape_w = PRODUCTS[0]
    x, w, _ = map(tf.constant, arrays(equation, shape_x, shape_w))
    fields = {"rounding": ROUNDINGS["fp8"]}
    with context.scope(True), context.override_extension(products.ProductContext, **fields):
        with products.unrounded():
            found = products.multiply(equation, x, w)
        assert np.any(found != products.multiply(equation, x, w))
    np.testing.assert_array_equal(found, products.multiply(equation, x, w))


@pytest.mark.parametrize("strategy", ["data", "fsdp_tensor"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_scales_are_those_of_whole_tensors_on_a_mesh(rounding, strategy):
    """The largest magnitude is on one device alone."""
    equation, shape_x, shape_w = "BLM,MH->BLH", (8, 16, 160), (160, 272)
    values = arrays(equation, shape_x, shape_w)
    values[0][5, 3, 7] = 1e4
    values[1][150, 33] = 70.0
    values[2][2, 2, 2] = 3e3

    def run(x, w, dz):
        return computed(rounding, equation, x, w, dz)

    split = partition(run, "data=4,model=2", strategy, layouts=["BLM", "weights:MH", "BLH"])(
        *values
    )
    whole = tf.function(run, jit_compile=True)(*map(tf.constant, values))
    for one, other in zip(whole, split, strict=True):
        scale = np.abs(one).max()
        np.testing.assert_allclose(np.asarray(other) / scale, one / scale, atol=1e-6)
