"""Compares the outer step of local updates with numbers computed by hand."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.wings.optimizers.local_updates import LocalUpdates

ZERO = initializers.constant(0.0)
SPECS = NestedMap(
    w=VariableSpec("w", "MH", (1, 2), "float32", ZERO),
    bias=VariableSpec("bias", "E", (2,), "float32", ZERO, update_rule=lambda w, _: w + 100.0),
)
THETA = NestedMap(w=tf.constant([[1.0, 2.0]]), bias=tf.constant([3.0, 4.0]))
MEANS = NestedMap(w=tf.constant([[0.5, 4.0]]), bias=tf.constant([7.0, 8.0]))


def rule(**values) -> LocalUpdates:
    return LocalUpdates.params().set(every=5, **values).instantiate()


def update(local: LocalUpdates, moments: NestedMap, stopped: bool = False):
    return local.update(SPECS, THETA, MEANS, moments, tf.constant(0), tf.constant(stopped))


def test_default_outer_step_sets_weights_to_the_mean():
    local = rule()
    moments = local.moment_specs(SPECS)
    assert moments.flatten() == []
    theta, moments = update(local, moments)
    np.testing.assert_allclose(theta.w, MEANS.w)
    np.testing.assert_allclose(theta.bias, MEANS.bias)
    assert moments.flatten() == []


def test_rates_of_weights_do_not_keep_them_from_the_mean():
    slow = SPECS.transform(lambda spec: dataclasses.replace(spec, learning_rate_factor=0.25))
    local = rule()
    nothing = local.moment_specs(slow)
    theta, _ = local.update(slow, THETA, MEANS, nothing, tf.constant(0), tf.constant(False))
    np.testing.assert_allclose(theta.w, MEANS.w)


@pytest.mark.parametrize(
    ("nesterov", "w"),
    [(False, [[1.0 - 0.5 * (0.9 * 10 + 0.5), 2.0 - 0.5 * (0.9 * 20 - 2.0)]]), (True, None)],
)
def test_momentum_skips_weights_with_an_update_rule(nesterov, w):
    local = rule(momentum=0.9, nesterov=nesterov, learning_rate=0.5)
    assert [path for path, _ in local.moment_specs(SPECS).flatten_items()] == ["w.first_moment"]
    moments = local.moment_specs(SPECS).pack([tf.constant([[10.0, 20.0]])])
    theta, new_moments = update(local, moments)
    moment = np.array([[0.9 * 10 + 0.5, 0.9 * 20 - 2.0]])
    np.testing.assert_allclose(new_moments.w.first_moment, moment, rtol=1e-6)
    if nesterov:
        w = np.array([[1.0, 2.0]]) - 0.5 * (np.array([[0.5, -2.0]]) + 0.9 * moment)
    np.testing.assert_allclose(theta.w, w, rtol=1e-6)
    np.testing.assert_allclose(theta.bias, MEANS.bias)
    kept, kept_moments = update(local, moments, stopped=True)
    for found, expected in ((kept, THETA), (kept_moments, moments)):
        for x, y in zip(found.flatten(), expected.flatten(), strict=True):
            np.testing.assert_array_equal(x, y)


def test_nesterov_without_momentum_is_rejected():
    with pytest.raises(ValueError, match="nesterov needs step.local_updates.momentum"):
        LocalUpdates.params().set(nesterov=True).instantiate()
