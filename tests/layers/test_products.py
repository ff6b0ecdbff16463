"""Tests of products with int8 weights against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.layers import products
from lingvo_gshard.layers.products import INT8, INT8_WEIGHTS

# Equation, shape of x, shape of the weight, and the axes of the weight that are summed over.
PRODUCTS = [
    ("BLM,MH->BLH", (2, 3, 8), (8, 5), (0,)),
    ("BLM,MND->BLND", (2, 3, 8), (8, 2, 5), (0,)),
    ("BLND,NDM->BLM", (2, 3, 2, 4), (2, 4, 5), (0, 1)),
    ("BLM,VM->BLV", (2, 3, 8), (5, 8), (1,)),
    ("CM,MH->CH", (1, 8), (8, 5), (0,)),
]


@pytest.fixture(autouse=True)
def no_weight_is_small(monkeypatch):
    monkeypatch.setattr(products, "SMALL", 0)


def stored(weight, layout, contracted, precision):
    with context.scope(), context.override_extension(products.ProductContext, precision=precision):
        return products.store(tf.constant(weight), layout, contracted)


def stored_for(equation, weight, axes, precision):
    layout = equation.partition("->")[0].split(",")[1]
    return stored(weight, layout, "".join(layout[axis] for axis in axes), precision)


def rounded(x, axes):
    """Returns int8 values of x and their scale, by NumPy alone."""
    scale = np.abs(x).max(axis=axes, keepdims=True) / 127.0
    return np.rint(x / np.where(scale > 0, scale, 1)).astype(np.int8), scale


def arrays(shape_x, shape_w):
    rng = np.random.default_rng(0)
    # Channels and rows of very different size, so that each needs a scale of its own.
    x = rng.normal(size=shape_x) * 10.0 ** rng.integers(-3, 3, (*shape_x[:-1], 1))
    w = rng.normal(size=shape_w) * 10.0 ** rng.integers(-3, 3, shape_w[-1:])
    return x.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize(("equation", "shape_x", "shape_w", "axes"), PRODUCTS)
def test_int8_products_are_those_of_rounded_rows_and_channels(equation, shape_x, shape_w, axes):
    x, w = arrays(shape_x, shape_w)
    weight = stored_for(equation, w, axes, INT8)
    assert weight[INT8].dtype == tf.int8
    found = products.multiply(equation, tf.constant(x), weight).numpy()

    values_x, scale_x = rounded(x, tuple(range(x.ndim))[-len(axes) :])
    values_w, scale_w = rounded(w, axes)
    sums = np.einsum(equation, values_x.astype(np.int64), values_w.astype(np.int64))
    outer, columns = x.shape[: -len(axes)], sums.shape[x.ndim - len(axes) :]
    row_scale = scale_x.reshape(*outer, *[1] * len(columns))
    expected = sums * row_scale * scale_w.reshape(columns)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("equation", "shape_x", "shape_w", "axes"), PRODUCTS)
def test_products_of_int8_weights_are_those_of_rounded_weights(equation, shape_x, shape_w, axes):
    x, w = arrays(shape_x, shape_w)
    weight = stored_for(equation, w, axes, INT8_WEIGHTS)
    found = products.multiply(equation, tf.constant(x), weight).numpy()
    values, scale = rounded(w, axes)
    np.testing.assert_allclose(found, np.einsum(equation, x, values * scale), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(products.restore(weight).numpy(), values * scale, rtol=1e-6)


def test_a_row_has_the_same_product_alone_and_among_others():
    x, w = arrays((32, 3000), (3000, 64))
    weight = stored(w, "MH", "M", INT8)
    multiply = tf.function(
        lambda x: products.multiply("CM,MH->CH", x, weight),
        jit_compile=True,
        reduce_retracing=False,
    )
    together = multiply(tf.constant(x)).numpy()
    for row in (0, 31):
        np.testing.assert_array_equal(multiply(tf.constant(x[row : row + 1]))[0], together[row])


def test_zero_rows_and_zero_channels_have_zero_products():
    x, w = arrays((4, 8), (8, 5))
    x[1], w[:, 2] = 0, 0
    found = products.multiply("CM,MH->CH", tf.constant(x), stored(w, "MH", "M", INT8)).numpy()
    assert np.isfinite(found).all()
    assert not found[1].any() and not found[:, 2].any()
    assert found[0, :2].all()


def test_rows_of_a_stored_table_are_those_of_the_rounded_table():
    _, table = arrays((1, 1), (6, 8))
    ids = np.array([[0, 5], [5, 3]])
    values, scale = rounded(table, (1,))
    for precision in (INT8, INT8_WEIGHTS):
        found = products.look_up(stored(table, "VM", "M", precision), tf.constant(ids)).numpy()
        np.testing.assert_allclose(found, (values * scale)[ids], rtol=1e-6)


def test_small_weights_keep_float_products_and_can_be_restored_alone(monkeypatch):
    monkeypatch.setattr(products, "SMALL", 50)
    tree = {"small": (7, 7), "large": (5, 10), "experts": (4, 7, 7)}
    layouts = {"small": "MH", "large": "MH", "experts": "EMH"}
    tree = {n: stored(np.ones(s, np.float32), layouts[n], "M", INT8) for n, s in tree.items()}
    assert INT8_WEIGHTS in tree["small"] and INT8 in tree["large"]
    # Each expert has a product of its own.
    assert INT8_WEIGHTS in tree["experts"]
    restored = products.restore([tree, tf.zeros([3])], only_small=True)
    assert restored[0]["small"].dtype == tf.float32
    assert products.is_stored(restored[0]["large"])
    assert restored[1].shape == [3]


def test_without_a_precision_weights_stay_as_they_are():
    weight = tf.ones([2, 3])
    assert products.store(weight, "MH", "M") is weight


def test_an_equation_that_is_no_product_of_matrices_is_refused():
    weight = stored(np.ones((3, 8, 5), np.float32), "EMH", "M", INT8)
    with pytest.raises(ValueError, match="EGCM,EMH->EGCH"):
        products.multiply("EGCM,EMH->EGCH", tf.ones([3, 1, 2, 8]), weight)
