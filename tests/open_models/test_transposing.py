"""Tests copies of transposed arrays against NumPy's."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from lingvo_gshard.wings.open_models.transposing import contiguous, copy

SHAPES = [(), (5,), (300, 7), (130, 257), (1, 9, 1), (3, 140, 5), (2, 3, 130, 4), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
def test_every_order_is_copied(shape, dtype):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    for order in itertools.permutations(range(len(shape))):
        view = values.transpose(order)
        found = contiguous(view)
        assert found.flags.c_contiguous and found.dtype == view.dtype
        np.testing.assert_array_equal(found, view)
        target = np.zeros(shape, dtype)
        copy(view.copy(order="C"), target.transpose(order))
        np.testing.assert_array_equal(target, values)


def test_parts_and_types():
    values = np.random.default_rng(0).normal(size=(6, 200, 150)).astype(np.float32)
    for view in (values[:, 10:190, 5:].transpose(2, 0, 1), values[::2].transpose(1, 2, 0)):
        narrow = contiguous(view, np.dtype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(narrow, view.astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(contiguous(narrow.T, np.dtype("f4")), narrow.T.astype("f4"))
        target = np.zeros((*view.shape[:-1], view.shape[-1] + 3), ml_dtypes.bfloat16)
        copy(view, target[..., 1:-2])
        np.testing.assert_array_equal(target[..., 1:-2], narrow)
        assert not target[..., 0].any() and not target[..., -2:].any()
    row = values[0, 0]
    assert contiguous(row) is row or contiguous(row).base is row.base
