# tests: wings/spmd_passes/loop_sums.py, wings/spmd_passes/builders.py
# tests: wings/spmd_passes/partial_operations.py, wings/spmd_passes/value_splits.py
"""Checks that sums over the iterations of loops are reduced over devices once, by compiled HLO."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.sharding import annotate, einsum, manual
from lingvo_gshard.sharding.options import PARTITIONERS
from lingvo_gshard.wings.functions.partition import partition

PARTS, LAYERS, B, L, M, H = 4, 3, 16, 8, 32, 64
WEIGHT = 4 * LAYERS * M * H


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, B, L, M)).astype(np.float32)
    return x, rng.standard_normal((count, B, L, H)).astype(np.float32)


def product(x_BLM, y_BLH):
    return einsum("BLM,BLH->MH", x_BLM, y_BLH)


def product_of_region(x_BLM, y_BLH):
    """Returns the same product as the gradient of a weight that a manual region has copies of."""
    weight = tf.zeros([M, H])
    with tf.GradientTape() as tape:
        tape.watch(weight)
        region = manual(lambda x, w: tf.einsum("BLM,MH->BLH", x, w), ["BLM", "MH"], "BLH")
        outputs = region(x_BLM, weight)
    return tape.gradient(outputs, weight, output_gradients=y_BLH)


def products(x_pBLM, y_pBLH, kind="weights", stacked=True, used_within=False, of_layer=product):
    """Returns the sum over parts of products that loops stack over layers, and a sum of squares."""
    layers = LAYERS if stacked else 1

    def of_layers(x_BLM, y_BLH):
        def body(r, stack):
            layer = of_layer(tf.sin(x_BLM * tf.cast(r + 1, tf.float32)), y_BLH)
            return r + 1, stack.write(r, annotate(tf.cast(layer, tf.bfloat16), "MH", kind))

        stack = tf.TensorArray(tf.bfloat16, layers, element_shape=[M, H])
        start = (tf.constant(0), stack)
        _, stack = tf.while_loop(lambda r, _: r < layers, body, start, maximum_iterations=layers)
        return stack.stack()

    def of_part(i, total, squares):
        x_BLM, y_BLH = annotate(x_pBLM[i], "BLM"), annotate(y_pBLH[i], "BLH")
        part = tf.cast(of_layers(x_BLM, y_BLH), tf.float32)
        if used_within:
            squares += tf.reduce_sum(part * part)
        return i + 1, annotate(total + 0.5 * part, "RMH", kind), squares

    zeros = annotate(tf.zeros([layers, M, H]), "RMH", kind)
    start = (tf.constant(0), zeros, tf.zeros([]))
    count = x_pBLM.shape[0]
    _, total, squares = tf.while_loop(lambda i, *_: i < count, of_part, start)
    return annotate(total, "RMH", kind), squares


def reduced(function, mesh, strategy, count=PARTS, partitioner="gspmd") -> int:
    """Compares results with those on one device; returns the bytes that are reduced over devices.

    bfloat16 terms are rounded before they are added up over devices, and not after it.
    """
    arguments = rows(count)
    expected = partition(function, "data=1")(*arguments)
    partitioned = partition(function, mesh, strategy, partitioner=partitioner)
    for one, other in zip(partitioned(*arguments), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-1)
    calls = partitioned.compile(*arguments).collectives()
    sums = ("all-reduce", "reduce-scatter")
    return sum(call.bytes * call.times for call in calls if call.kind in sums)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("count", [2, PARTS])
def test_products_of_two_nested_loops_are_reduced_once(count, partitioner):
    assert reduced(products, "data=8", "data", count, partitioner) == WEIGHT


def test_products_of_one_loop_are_reduced_once():
    def function(x, y):
        return products(x, y, stacked=False)

    assert reduced(function, "data=8", "data") == WEIGHT // LAYERS


def test_products_that_are_split_over_other_devices_are_reduced_once():
    assert reduced(products, "data=4,model=2", "data_tensor") == WEIGHT // 2


def test_gradients_of_manual_regions_are_reduced_once():
    def function(x, y):
        return products(x, y, of_layer=product_of_region)

    assert reduced(function, "data=8", "data") == WEIGHT
    assert reduced(function, "data=4,model=2", "data_tensor") == WEIGHT // 2


def test_sums_that_are_split_over_the_same_devices_are_reduced_in_each_iteration():
    # XLA for CPU reduces bfloat16 as float32.
    assert reduced(products, "data=8", "fsdp") == PARTS * WEIGHT


def test_terms_that_are_used_otherwise_are_reduced_in_each_iteration():
    def function(x, y):
        return products(x, y, used_within=True)

    assert reduced(function, "data=8", "data") >= PARTS * WEIGHT


def test_a_sum_that_is_rounded_is_reduced_in_its_narrow_type():
    def function(x, y):
        total, squares = products(x, y)
        return tf.cast(tf.cast(total, tf.bfloat16), tf.float32), squares

    arguments = rows(PARTS)
    module = partition(function, "data=8", "data").lower(*arguments)
    text = module.exported().mlir_module()
    assert (
        f"tensor<8x{LAYERS}x{M}x{H}xbf16>, tensor<bf16>) -> tensor<{LAYERS}x{M}x{H}xbf16>" in text
    )
