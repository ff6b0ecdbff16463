"""Compares Adafactor with its paper's recurrence, and checks the factored dimensions."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.step.adafactor import Adafactor


def numpy_matrix(w, gradients, rates, relative=False):
    """Algorithm 4 of arXiv 1804.04235 for one matrix, by sums over rows and columns, in float64."""
    w = w.astype(np.float64)
    rows, columns = np.zeros(w.shape[0]), np.zeros(w.shape[1])
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        beta = min(0.99, 1 - t**-0.8)
        square = g.astype(np.float64) ** 2 + 1e-30
        rows = beta * rows + (1 - beta) * square.sum(1)
        columns = beta * columns + (1 - beta) * square.sum(0)
        v = np.outer(rows, columns) / rows.sum()
        w = w - rate * clipped(g / np.sqrt(v)) * weight_scale(w, relative)
    return w


def numpy_full(w, gradients, rates, relative=False):
    """Algorithm 5 of the same paper, for a weight that is not factored."""
    w = w.astype(np.float64)
    v = np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        beta = min(0.99, 1 - t**-0.8)
        v = beta * v + (1 - beta) * (g.astype(np.float64) ** 2 + 1e-30)
        w = w - rate * clipped(g / np.sqrt(v)) * weight_scale(w, relative)
    return w


def clipped(u):
    return u / max(1.0, np.sqrt(np.mean(u**2)))


def weight_scale(w, relative):
    return max(1e-3, np.sqrt(np.mean(w**2))) if relative else 1.0


def train(optimizer, spec, start, gradients, rates):
    specs, theta = NestedMap(w=spec), NestedMap(w=tf.constant(start))
    moments = optimizer.moment_specs(specs).transform(lambda s: s.init(tf.constant([0, 0])))
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True)):
        theta, moments = optimizer.update(
            specs, theta, NestedMap(w=tf.constant(gradient)), moments, tf.constant(step), rate
        )
    return theta.w.numpy()


def draw(shape, steps=6):
    generator = np.random.default_rng(1)
    start = generator.normal(size=shape).astype(np.float32)
    gradients = generator.normal(size=(steps, *shape)).astype(np.float32)
    gradients[2:3] *= 30.0
    return start, gradients, np.linspace(0.1, 0.05, steps).astype(np.float32)


def make_spec(layout, shape):
    return VariableSpec("w", layout, shape, "float32", initializers.normal(1.0))


def make_optimizer(**values):
    return Adafactor(Adafactor.params().set(**{"min_factored_size": 2, **values}))


@pytest.mark.parametrize("relative", [False, True])
def test_matrix_follows_the_factored_recurrence(relative):
    start, gradients, rates = draw((5, 7))
    optimizer = make_optimizer(relative_update=relative)
    result = train(optimizer, make_spec("MH", (5, 7)), start, gradients, rates)
    expected = numpy_matrix(start, gradients, rates, relative)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("relative", [False, True])
def test_vector_follows_the_full_recurrence(relative):
    start, gradients, rates = draw((9,))
    optimizer = make_optimizer(relative_update=relative)
    result = train(optimizer, make_spec("M", (9,)), start, gradients, rates)
    expected = numpy_full(start, gradients, rates, relative)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_stacked_layers_are_updated_separately():
    start, gradients, rates = draw((3, 4, 5))
    result = train(make_optimizer(), make_spec("RMH", (3, 4, 5)), start, gradients, rates)
    for layer in range(3):
        expected = numpy_matrix(start[layer], gradients[:, layer], rates)
        np.testing.assert_allclose(result[layer], expected, rtol=1e-5, atol=1e-6)


def test_experts_have_separate_second_moments():
    """With more experts than model dimensions, each expert is still factored over M and H."""
    start, gradients, _ = draw((8, 3, 4), steps=1)
    optimizer = make_optimizer(update_clip=1e9)
    result = train(optimizer, make_spec("EMH", (8, 3, 4)), start, gradients, [0.1])
    for expert in range(8):
        square = gradients[0, expert].astype(np.float64) ** 2
        v = np.outer(square.mean(1), square.mean(0)) / square.mean()
        expected = start[expert] - 0.1 * gradients[0, expert] / np.sqrt(v)
        np.testing.assert_allclose(result[expert], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layout", "shape", "row", "column"),
    [
        ("MH", (256, 512), "M", "H"),
        ("EMH", (2048, 256, 512), "EM", "EH"),
        ("EHM", (4096, 512, 256), "EH", "EM"),
        ("REMH", (1024, 2048, 256, 512), "REM", "REH"),
        ("MND", (512, 16, 128), "MN", "ND"),
        ("VM", (32000, 512), "V", "M"),
    ],
)
def test_factors_over_the_two_largest_dimensions_that_are_not_stacked(layout, shape, row, column):
    optimizer = Adafactor(Adafactor.params())
    moments = optimizer.moment_specs(NestedMap(w=make_spec(layout, shape))).w
    assert moments.row_moment.layout == row
    assert moments.column_moment.layout == column
    sizes = dict(zip(layout, shape, strict=True))
    assert moments.row_moment.shape == tuple(sizes[letter] for letter in row)


@pytest.mark.parametrize(
    ("layout", "shape"), [("M", (512,)), ("ME", (512, 2048)), ("MND", (512, 8, 64)), ("", ())]
)
def test_small_dimensions_are_not_factored(layout, shape):
    moments = Adafactor(Adafactor.params()).moment_specs(NestedMap(w=make_spec(layout, shape))).w
    assert list(moments) == ["second_moment"]
    assert moments.second_moment.layout == layout


def test_zero_gradient_changes_nothing():
    start = np.ones((4, 5), np.float32)
    result = train(
        make_optimizer(), make_spec("MH", (4, 5)), start, np.zeros((2, 4, 5), np.float32), [0.1] * 2
    )
    np.testing.assert_array_equal(result, start)
