# tests: wings/kernels/grouped.py, wings/kernels/activation_call.py, wings/kernels/grouped_call.py
# tests: wings/kernels/grouped_tpu.py, wings/kernels/grouped_tpu_product.py
# tests: wings/kernels/grouped_triton.py, wings/kernels/grouped_rows.py
"""Compares the bodies of grouped products, on CPUs step by step, with a loop of NumPy."""

import math

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers import feed_forward
from lingvo_gshard.sharding.einsum import Blocks
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.kernels.activation_call import ActivationCall
from lingvo_gshard.wings.kernels.grouped import (
    ACTIVATED,
    ACTIVATED_GRADIENT,
    FORWARD,
    ROWS,
    ROWS_GRADIENT,
    SUMMED,
    WEIGHT_GRADIENT,
)
from lingvo_gshard.wings.kernels.grouped_call import GroupedCall
from lingvo_gshard.wings.kernels.grouped_rows import RowsCall
from lingvo_gshard.wings.low_precision.rounding import ROUNDINGS

# Room for rows R, sizes M and H, and the rows of each group.
CASES = {
    "uneven_and_empty": (300, 128, 160, (100, 0, 37, 0, 113)),
    "all_in_one": (256, 128, 200, (0, 256, 0)),
    "one_row": (512, 200, 128, (1, 0, 0, 500)),
    # More than a tile of the kernel for TPUs sums over, and no multiple of it.
    "long_rows": (200, 5000, 160, (100, 37)),
}
BODIES = ("tpu_interpreted", "cuda_interpreted")
ACTIVATIONS = (
    *("swiglu", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "linear"),
    *("geglu", "geglu_tanh", "reglu", "glu", "bilinear", "clamped_swiglu"),
)
# float32, and values that bfloat16 rounds to 8 bits.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-8}


def reference(rows, weights, d_products, sizes):
    """Returns products, the gradients of rows and of weights, all float64."""
    products, d_rows, d_weights = (
        np.zeros(shape) for shape in (d_products.shape, rows.shape, weights.shape)
    )
    start = 0
    for group, size in enumerate(sizes):
        at = slice(start, start + size)
        products[at] = rows[at] @ weights[group]
        d_rows[at] = d_products[at] @ weights[group].T
        d_weights[group] = rows[at].T @ d_products[at]
        start += size
    return products, d_rows, d_weights


def activation_of(name):
    """Returns the layer's activation of a name, and the kernel's."""
    params = Params()
    feed_forward.define(params)
    params.activation = name
    if name == "clamped_swiglu":
        params.set(gate_alpha=1.3, gate_limit=0.8, gate_offset=0.4)
    return feed_forward.of(params, "layer"), ActivationCall(**feed_forward.options(params))


class BodiesTest(testing.TestCase, parameterized.TestCase):
    def check(self, case, platform, dtype):
        count, inner, outer, sizes = CASES[case]
        generator = np.random.default_rng(1)
        shapes = [(count, inner), (len(sizes), inner, outer), (count, outer)]
        arrays = [
            tf.cast(generator.normal(size=shape), dtype).numpy().astype(dtype) for shape in shapes
        ]
        used = sum(sizes)
        # What is in rows after the last group must not matter.
        for array in (arrays[0], arrays[2]):
            array[used:] = np.nan
        rows, weights, d_products = arrays
        sizes_E = np.array(sizes, np.int32)
        call = GroupedCall(used)
        (products,) = FORWARD.body(platform)(call, rows, weights, sizes_E)
        transposed = GroupedCall(used, is_transposed=True)
        (d_rows,) = FORWARD.body(platform)(transposed, d_products, weights, sizes_E)
        (d_weights,) = WEIGHT_GRADIENT.body(platform)(call, rows, d_products, sizes_E)
        wide = [x.astype(np.float64) for x in arrays]
        expected = reference(*wide, sizes)
        terms = (inner, outer, max(sizes))
        for found, wanted, count_of_terms in zip(
            (products, d_rows, d_weights), expected, terms, strict=True
        ):
            # Roundings of a long sum add up like a random walk, in an order that the CPU chooses.
            tolerance = max(TOLERANCES[dtype], 2**-24 * math.sqrt(count_of_terms))
            self.assertEqual(found.dtype, rows.dtype)
            count = None if found.ndim == 3 else used
            self.assertAllClose(
                np.asarray(found, np.float64)[:count],
                wanted[:count],
                rtol=0,
                atol=tolerance * np.abs(wanted[:count]).max(),
            )

    @parameterized.parameters(*BODIES)
    def test_a_body_computes_products_and_gradients_of_uneven_groups(self, platform):
        self.check("uneven_and_empty", platform, "float32")

    @parameterized.product(case=list(CASES), platform=BODIES, dtype=["float32", "bfloat16"])
    @pytest.mark.slow
    def test_a_body_computes_products_and_gradients(self, case, platform, dtype):
        self.check(case, platform, dtype)

    def check_activated(self, case, platform, dtype, activation):
        """Compares activated rows, their products and all gradients with those of float64."""
        count, inner, outer, sizes = CASES[case]
        function, call = activation_of(activation)
        generator = np.random.default_rng(1)
        hidden_shapes = [(count, inner)] * (2 if function.is_gated else 1)
        arrays = [
            tf.cast(generator.normal(size=shape), dtype).numpy().astype(dtype)
            for shape in [(len(sizes), inner, outer), (count, outer), *hidden_shapes]
        ]
        used = sum(sizes)
        for array in arrays[1:]:
            array[used:] = np.nan
        weights, d_products, *hidden = arrays
        sizes_E = np.array(sizes, np.int32)
        grouped = GroupedCall(used, activation=call)
        transposed = GroupedCall(used, is_transposed=True, activation=call)
        if platform == "tpu_interpreted":
            (products,) = ACTIVATED.body(platform)(grouped, weights, sizes_E, *hidden)
            found = ACTIVATED_GRADIENT.body(platform)(
                transposed, d_products, weights, sizes_E, *hidden
            )
        else:
            forward = FORWARD.body(platform)
            (rows,) = ROWS.body(platform)(RowsCall(call), sizes_E, *hidden)
            (products,) = forward(grouped, rows, weights, sizes_E)
            (d_rows,) = forward(transposed, d_products, weights, sizes_E)
            found = ROWS_GRADIENT.body(platform)(RowsCall(call), sizes_E, d_rows, *hidden)
        *d_hidden, activated = found
        wide = [tf.constant(each[:used].astype(np.float64)) for each in hidden]
        with tf.GradientTape() as tape:
            tape.watch(wide)
            rows = function(*wide)
        wanted_products, d_rows, _ = reference(
            rows.numpy(), weights.astype(np.float64), d_products.astype(np.float64)[:used], sizes
        )
        wanted_d_hidden = tape.gradient(rows, wide, tf.constant(d_rows))
        wanted = [wanted_products, *wanted_d_hidden, rows]
        for found, expected in zip([products, *d_hidden, activated], wanted, strict=True):
            self.assertEqual(found.dtype, weights.dtype)
            self.assertAllClose(
                np.asarray(found, np.float64)[:used],
                expected,
                rtol=0,
                # Activated rows are rounded before they are multiplied.
                atol=2 * TOLERANCES[dtype] * np.abs(expected).max(),
            )

    @parameterized.parameters(*BODIES)
    def test_activated_products(self, platform):
        self.check_activated("uneven_and_empty", platform, "float32", "swiglu")

    @parameterized.product(case=list(CASES), platform=BODIES, dtype=["float32", "bfloat16"])
    @pytest.mark.slow
    def test_activated_products_and_gradients(self, case, platform, dtype):
        self.check_activated(case, platform, dtype, "swiglu")

    @parameterized.parameters(*ACTIVATIONS)
    def test_activations_are_those_of_layers(self, name):
        """Compares values and gradients in float32 with the layer's in float64."""
        function, call = activation_of(name)
        generator = np.random.default_rng(1)
        hidden = generator.normal(size=(2 if function.is_gated else 1, 500), scale=2.0)
        d_activated = generator.normal(size=500)
        wide = [tf.constant(h) for h in hidden]
        with tf.GradientTape() as tape:
            tape.watch(wide)
            activated = function(*wide)
        d_wide = tape.gradient(activated, wide, tf.constant(d_activated))
        narrow = hidden.astype(np.float32)
        found = call.with_gradient(d_activated.astype(np.float32), *narrow)
        for one, other in zip(found, [*d_wide, activated], strict=True):
            self.assertAllClose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
        self.assertAllClose(call(*narrow), activated, rtol=0, atol=1e-5)

    @parameterized.product(platform=BODIES, inner=[128, 5000])
    def test_summed_products(self, platform, inner):
        """5,000 is more than a tile of the kernel for TPUs sums over, and no multiple of it."""
        generator = np.random.default_rng(1)
        sizes, outer = (100, 0, 37), 160
        rows = generator.normal(size=(2, 150, inner)).astype(np.float32)
        weights = generator.normal(size=(2, 3, outer, inner)).astype(np.float32)
        call = GroupedCall(137, is_transposed=True)
        (found,) = SUMMED.body(platform)(call, np.array(sizes, np.int32), *rows, *weights)
        expected = sum(
            reference(r, w.swapaxes(1, 2), np.zeros((150, outer)), sizes)[0]
            for r, w in zip(rows.astype(np.float64), weights.astype(np.float64), strict=True)
        )
        self.assertAllClose(found[:137], expected[:137], rtol=0, atol=1e-6 * np.abs(expected).max())

    @parameterized.product(
        rounding=["fp8", "fp8_blocks"], is_gradient=[False, True], columns=[96, 200, 1200]
    )
    def test_rounded_rows_are_those_of_operations(self, rounding, is_gradient, columns):
        """Magnitudes cover the range of float32, its limits and those of both types."""
        rows, used = 150, (37, 0, 100)
        generator = np.random.default_rng(1)
        exponents = generator.integers(-140, 120, size=(rows, 1))
        x = (generator.normal(size=(rows, columns)) * np.exp2(exponents)).astype(np.float32)
        for row, largest in enumerate((0.0, np.inf, np.nan, 448.0, 57344.0)):
            x[row] /= np.abs(x[row]).max()
            x[row, row + 3] = largest
            x[row + 8] = np.nextafter(np.float32(largest), np.float32(np.inf))
        by_rows = ROUNDINGS[rounding].by_rows
        rule = by_rows.gradient if is_gradient else by_rows.activation
        factor = rule(tf.constant(x), "CM")("M")
        expected = factor.blocks or Blocks(factor.values, factor.scale, 0, factor.dtype)
        dtype, block = by_rows.row_format(is_gradient)
        self.assertEqual(dtype, expected.dtype)
        call = RowsCall(None, dtype, block)
        values, scales = ROWS.body("cuda_interpreted")(call, np.array(used, np.int32), x)
        self.assertEqual(values.dtype, dtype)
        end = sum(used)
        np.testing.assert_array_equal(scales[:end], expected.scales[:end])
        found = np.asarray(values, np.float32)[:end]
        np.testing.assert_array_equal(found, expected.values[:end])

    @parameterized.parameters(
        ("sigmoid", (0, 0)), ("clamped_swiglu", (70, 80)), ("gelu", (150,)), ("swiglu", (20, 77))
    )
    def test_activated_rows_are_rounded(self, activation, sizes):
        """Compares with rounding what the function itself returns, for none, some and all rows.

        In float32, sums in another order would round some numbers otherwise.
        """
        function, call = activation_of(activation)
        generator = np.random.default_rng(1)
        shape = (2 if function.is_gated else 1, 150, 200)
        hidden = generator.normal(size=shape).astype(ml_dtypes.bfloat16)
        used = sum(sizes)
        hidden[:, used:] = np.nan
        rounded = RowsCall(call, "float8_e4m3fn")
        sizes_E, body = np.array(sizes, np.int32), ROWS.body("cuda_interpreted")
        values, scales = body(rounded, sizes_E, *hidden)
        rows = tf.constant(np.asarray(call(*hidden)[:used]))
        expected = ROUNDINGS["fp8"].by_rows.activation(rows, "CM")("M")
        np.testing.assert_array_equal(scales[:used], expected.scale)
        found = np.asarray(values, ml_dtypes.bfloat16)[:used]
        np.testing.assert_array_equal(found, expected.values)

    @parameterized.product(
        platform=BODIES, dtypes=[("float8_e4m3fn",) * 2, ("float8_e5m2", "float8_e4m3fn")]
    )
    def test_factors_of_8_bits(self, platform, dtypes):
        self.check_scaled(platform, dtypes)

    @parameterized.parameters("uneven_and_empty", "long_rows")
    def test_factors_of_int8(self, case):
        self.check_scaled("tpu_interpreted", ("int8", "int8"), case)

    def test_blocks_with_scales(self):
        """DeepSeek-V3's blocks: 128 numbers of a row, and 128 x 128 of a weight."""
        # Of 96 columns, two tiles of 64 and 32 share a block.
        for inner, outer in ((300, 200), (96, 300), (200, 96)):
            self.check_blocks(inner, outer)

    def check_blocks(self, inner, outer):
        count, sizes, size = 300, (100, 0, 37, 0, 113), 128
        generator = np.random.default_rng(1)
        e4m3 = ml_dtypes.float8_e4m3fn
        shapes = [(count, inner), (len(sizes), outer, inner)]
        rows, weights = ((20 * generator.normal(size=s)).astype(e4m3) for s in shapes)
        blocks, columns = -(-inner // size), -(-outer // size)
        row_scales, weight_scales = (
            generator.uniform(0.1, 2.0, size=shape).astype(np.float32)
            for shape in ((count, blocks), (len(sizes), columns, blocks))
        )
        used = sum(sizes)
        call = GroupedCall(used, True, (e4m3.__name__,) * 2, size)
        arrays = [x.astype(ml_dtypes.bfloat16) for x in (rows, weights)]
        scales = [np.array(sizes, np.int32), row_scales, weight_scales]
        (products,) = FORWARD.body("cuda_interpreted")(call, *arrays, *scales)
        wide = rows.astype(np.float64) * np.repeat(row_scales, size, 1)[:, :inner]
        of_elements = np.repeat(np.repeat(weight_scales, size, 1), size, 2)[:, :outer, :inner]
        wide_weights = (weights.astype(np.float64) * of_elements).swapaxes(1, 2)
        expected = reference(wide, wide_weights, np.zeros((count, outer)), sizes)[0][:used]
        self.assertAllClose(
            np.asarray(products, np.float64)[:used],
            expected,
            rtol=2**-8,
            atol=1e-5 * np.abs(expected).max(),
        )

    def check_scaled(self, platform, dtypes, case="uneven_and_empty"):
        """Compares the product of factors of 8 bits, times scales of rows and columns."""
        count, inner, outer, sizes = CASES[case]
        generator = np.random.default_rng(1)
        shapes = [(count, inner), (len(sizes), outer, inner)]
        rows, weights = (
            (20 * generator.normal(size=shape)).astype(dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        row_scales, column_scales = (
            generator.uniform(0.1, 2.0, size=shape).astype(np.float32)
            for shape in ((count, 1), (len(sizes), 1, outer))
        )
        used = sum(sizes)
        row_scales[used:] = np.nan
        call = GroupedCall(used, is_transposed=True, dtypes=dtypes)
        arrays = [x.astype(ml_dtypes.bfloat16) for x in (rows, weights)]
        scales = [row_scales, column_scales]
        sizes_E = np.array(sizes, np.int32)
        (products,) = FORWARD.body(platform)(call, *arrays, sizes_E, *scales)
        self.assertEqual(products.dtype, ml_dtypes.bfloat16)
        rows, weights = (x.astype(np.float64) for x in (rows, weights))
        expected = reference(rows, weights.swapaxes(1, 2), np.zeros((count, outer)), sizes)[0]
        columns = np.repeat(column_scales[:, 0], sizes, axis=0)
        expected = expected[:used] * row_scales[:used] * columns
        self.assertAllClose(
            np.asarray(products, np.float64)[:used],
            expected,
            rtol=2**-8,
            atol=1e-5 * np.abs(expected).max(),
        )


class CallsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("tpu", 64, 128, tf.float64, "float64"),
        ("tpu", 64, 64, tf.bfloat16, "fewer than 128 columns"),
        ("cuda", 64, 128, tf.float64, "float64"),
        ("cuda", 64, 8, tf.bfloat16, "16 columns or more"),
        ("cuda", 2**26, 128, tf.bfloat16, "2^31 elements"),
        ("cuda", 64, 128, tf.float16, ""),
        ("tpu_interpreted", 64, 128, tf.float32, ""),
    )
    def test_what_no_kernel_computes_is_said(self, platform, rows, columns, dtype, expected):
        weights = tf.zeros([2, 128, columns], dtype)
        found = kernels.grouped.obstacle(platform, rows, weights, dtype.name)
        self.assertIn(expected, found)
        self.assertEqual(bool(expected), bool(found))

    def test_factors_of_8_bits_need_more_columns_on_gpus(self):
        weights = tf.zeros([2, 128, 16], tf.bfloat16)
        self.assertEqual(kernels.grouped.obstacle("cuda", 64, weights, "bfloat16"), "")
        found = kernels.grouped.obstacle("cuda", 64, weights, "bfloat16", is_rounded=True)
        self.assertIn("32 columns or more", found)

    @parameterized.parameters(
        # Megablox: 256 tiles, and 7 that two groups share.
        ("tpu", 65536, 8, 65536, (256 + 7) * 256 / 65536),
        # Room for twice as many rows as are usual.
        ("tpu", 8192, 4, 16384, (64 + 3) * 128 / 16384),
        # Each group has whole tiles of 128 rows.
        ("cuda", 8000, 8, 8000, 8 * 1024 / 8000),
        ("cuda", 64, 8, 64, 2.0),
        # Two rows have one group each.
        ("cuda", 2, 8, 2, 16.0),
        ("tpu", 2, 8, 2, 128.0),
    )
    def test_the_share_counts_whole_tiles(self, platform, usual, groups, rows, expected):
        module = kernels.grouped._module(platform)
        self.assertEqual(module.computed_share(GroupedCall(usual), rows, groups), expected)


if __name__ == "__main__":
    testing.main()
