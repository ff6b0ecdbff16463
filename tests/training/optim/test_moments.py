"""Tests moment dtypes and weight decay, which all optimizers with moments share."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.wings.optimizers.lion import Lion
from lingvo_gshard.wings.optimizers.momentum import Momentum
from lingvo_gshard.wings.optimizers.muon import Muon
from tests.training.optim import one_weight

CLASSES = [Adam, Lion, Momentum, Muon]
RATES = {Adam: 0.02, Lion: 0.02, Momentum: 0.1, Muon: 0.1}


def make_spec(path: str, layout: str, shape: tuple[int, ...]) -> VariableSpec:
    return VariableSpec(path, layout, shape, "float32", initializers.constant(0.0))


def read(moments, name: str) -> np.ndarray:
    """Returns a stored moment in float64, by the definition of its levels."""
    kept = np.asarray(moments[name]).astype(np.float64)
    if f"{name}_scale" not in moments:
        return kept
    scale = np.asarray(moments[f"{name}_scale"]).astype(np.float64)[..., None]
    if name == "second_moment":
        return (scale * (np.maximum(kept, 1) / 255) ** 2) ** 2
    return scale * np.sign(kept) * (kept / 127) ** 2


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_adam_with_narrow_moments_follows_the_recurrence(dtype):
    """Compares every step with Adam's recurrence from the stored moments."""
    start, gradients, rates = one_weight.draw("MH", 12)
    optimizer = Adam(Adam.params().set(moment_dtype=dtype, epsilon=1e-6))
    spec = one_weight.spec("MH")
    weight, moments = start, one_weight.first_moments(optimizer, spec)
    for index, (g, rate) in enumerate(zip(gradients.astype(np.float64), rates, strict=True)):
        m = 0.9 * read(moments, "first_moment") + 0.1 * g
        v = 0.98 * read(moments, "second_moment") + 0.02 * g**2
        m_hat, v_hat = m / (1 - 0.9 ** (index + 1)), v / (1 - 0.98 ** (index + 1))
        expected = np.asarray(weight) - rate * m_hat / (np.sqrt(v_hat) + 1e-6)
        weight, moments = one_weight.step(
            optimizer, spec, weight, gradients[index], moments, index, rate
        )
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)
        for name, value in (("first_moment", m), ("second_moment", v)):
            largest = np.abs(value).max(-1, keepdims=True)
            # Neighboring levels differ by at most 2/127, or 4/127 for a fourth power.
            share = {"bfloat16": 2.0**-7, "int8": 2.0 / 127}[dtype]
            assert (np.abs(read(moments, name) - value) <= share * largest * 1.01).all()


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "int8"])
@pytest.mark.parametrize("cls", CLASSES)
def test_narrow_moments_train_as_well(cls, dtype):
    """Minimizes a quadratic whose curvatures span two decades."""
    target, curvature = np.linspace(-1, 1, 48).reshape(6, 8), np.logspace(-2, 0, 48).reshape(6, 8)
    spec, rate = one_weight.spec("MH"), RATES[cls]

    def train(moment_dtype: str) -> float:
        optimizer = cls(cls.params().set(moment_dtype=moment_dtype))

        @tf.function(jit_compile=True, autograph=False)
        def take(weight, moments, index):
            gradient = tf.cast(curvature, tf.float32) * (weight - tf.cast(target, tf.float32))
            decayed = rate * (1.0 - tf.cast(index, tf.float32) / 400)
            theta, moments = optimizer.update(
                NestedMap(w=spec), NestedMap(w=weight), NestedMap(w=gradient),
                NestedMap(w=moments), index, decayed,
            )  # fmt: skip
            return theta.w, moments.w

        weight, moments = tf.zeros([6, 8]), one_weight.first_moments(optimizer, spec)
        for index in range(400):
            weight, moments = take(weight, moments, tf.constant(index))
        return float(np.sum(curvature * (weight - target) ** 2))

    start = np.sum(curvature * target**2)
    assert train("float32") < 0.01 * start
    assert train(dtype) < train("float32") + 1e-3 * start


def test_moments_have_their_dtypes_and_the_weights_layout():
    specs = NestedMap(
        w=make_spec("w", "EMH", (2, 3, 4)),
        b=make_spec("b", "EH", (2, 4)),
    )
    moments = Adam(Adam.params().set(moment_dtype="int8")).moment_specs(specs)
    found = {name: (s.layout, s.shape, s.dtype) for name, s in moments.w.items()}
    assert found == {
        "first_moment": ("EMH", (2, 3, 4), "int8"),
        "first_moment_scale": ("EM", (2, 3), "float32"),
        "second_moment": ("EMH", (2, 3, 4), "uint8"),
        "second_moment_scale": ("EM", (2, 3), "float32"),
    }
    assert {name: s.dtype for name, s in moments.b.items()} == {
        "first_moment": "float32",
        "second_moment": "float32",
    }
    moments = Lion(Lion.params().set(moment_dtype="bfloat16")).moment_specs(specs)
    assert [(s.layout, s.dtype) for s in moments.flatten()] == [
        ("EH", "bfloat16"),
        ("EMH", "bfloat16"),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("cls", CLASSES)
def test_stopped_step_changes_nothing(cls, dtype):
    start, gradients, rates = one_weight.draw("MH", 3)
    optimizer = cls(cls.params().set(moment_dtype=dtype, weight_decay=0.1))
    spec = one_weight.spec("MH")
    weight, moments = one_weight.train(optimizer, spec, start, gradients, rates)
    gradients[0, 0, 0] = np.nan
    after = one_weight.step(optimizer, spec, weight, gradients[0], moments, 3, 0.1, stopped=True)
    tf.nest.map_structure(np.testing.assert_array_equal, after, (weight, moments))


@pytest.mark.parametrize("cls", CLASSES)
def test_excluded_weights_do_not_decay(cls):
    optimizer = cls(cls.params().set(weight_decay=0.5, weight_decay_exclude=("*.table", "inner")))
    specs = NestedMap(
        {
            path: make_spec(f"{path}.{name}", layout, shape)
            for path, name, layout, shape in (
                ("outer", "w", "MH", (2, 3)),
                ("inner", "w", "MH", (2, 3)),
                ("embedding", "table", "VM", (4, 2)),
                ("norm", "scale", "RM", (5, 2)),
                ("expert", "bias", "EH", (5, 3)),
            )
        }
    )
    optimizer.check(specs)
    theta = specs.transform(lambda s: tf.ones(s.shape))
    moments = optimizer.moment_specs(specs).transform(lambda s: s.init(tf.constant([0, 0])))
    zeros = theta.transform(tf.zeros_like)
    theta, _ = optimizer.update(specs, theta, zeros, moments, tf.constant(0), tf.constant(0.1))
    decayed = {name: float(tf.reduce_mean(w)) for name, w in theta.flatten_items()}
    assert decayed.pop("outer") == pytest.approx(0.95)
    assert set(decayed.values()) == {1.0}


def test_each_row_has_its_own_scale():
    """A small row next to a large one keeps its precision."""
    start, gradients, rates = one_weight.draw("MH", 1)
    gradients[0, 1] *= 1e-6
    optimizer = Adam(Adam.params().set(moment_dtype="int8"))
    _, moments = one_weight.train(optimizer, one_weight.spec("MH"), start, gradients, rates)
    np.testing.assert_allclose(
        moments.first_moment_scale, 0.1 * np.abs(gradients[0]).max(-1), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"moment_dtype": "int4"},
            "moment_dtype is 'int4'; expected 'float32', 'bfloat16' or 'int8'",
        ),
    ],
)
def test_invalid_values_name_their_path(values, message):
    with pytest.raises(ValueError, match=message):
        Adam(Adam.params().set(**values))


def test_exclusion_that_matches_no_weight_is_rejected():
    optimizer = Adam(Adam.params().set(weight_decay_exclude=("*.tabel",)))
    spec = dataclasses.replace(one_weight.spec("MH"), path="embedding.table")
    with pytest.raises(
        ValueError, match=r"weight_decay_exclude: no layer or weight is named '\*\.tab"
    ):
        optimizer.check(NestedMap(w=spec))
