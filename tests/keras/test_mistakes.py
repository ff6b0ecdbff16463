# tests: keras/fitting.py, keras/layouts.py, keras/gshard_layer.py
"""Tests the messages for models and options that cannot be trained over a mesh."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.keras import fit
from tests.keras import models


def fit_cnn(**options):
    return fit(models.dense(), *models.images(), batch_size=8, verbose=0, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`mesh` is missing, such as mesh='data=4,model=2'"),
        ({"mesh": "data=8", "layout": {".*/hiden/kernel": "MH"}}, "no variable is named '.*/hiden"),
        ({"mesh": "data=8", "layout": {".*out/.*": "MH"}}, "has 2 dimensions, but .*out/bias"),
        ({"mesh": "data=8", "layout": {"dense/out/kernel": (None, "model")}}, "no axis 'model'"),
        (
            {"mesh": "data=8", "layout": {".*out/kernel": "MV", "dense/out/.*": "MV"}},
            "matches several patterns",
        ),
        ({"mesh": "data=8", "strategy": "dta"}, "unknown strategy 'dta'"),
    ],
)
def test_options(options, message):
    with pytest.raises(UserError, match=message):
        fit_cnn(**options)


def test_models_that_are_not_compiled():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(UserError, match="is not compiled; call compile"):
        fit(model, np.zeros((8, 2)), np.zeros((8, 1)), mesh="data=8")
    with pytest.raises(UserError, match="expected a compiled Keras model; got str"):
        fit("model", mesh="data=8")
    model.compile(loss="mse", run_eagerly=True)
    with pytest.raises(UserError, match="run_eagerly=True"):
        fit(model, np.zeros((8, 2)), np.zeros((8, 1)), mesh="data=8")


class WithText(keras.layers.Layer):
    """Computes with strings, for which XLA has no kernels."""

    def call(self, x):
        return x + tf.cast(tf.strings.length(tf.strings.as_string(x)), tf.float32)


class WithVariable(keras.layers.Layer):
    """Has a variable that Keras does not track."""

    def __init__(self):
        super().__init__()
        self.hidden = [lambda: None]
        self.hidden[0] = _variable

    def call(self, x):
        return x * self.hidden[0]()


_VARIABLES = []


def _variable():
    return _VARIABLES[0]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (WithText, "has no kernel for (AsString|StringLength).*belong into the dataset"),
        (WithVariable, "uses variables: untracked.*Make them weights of a layer"),
    ],
)
def test_models_that_xla_cannot_compile(layer, message):
    _VARIABLES[:] = [tf.Variable(2.0, name="untracked")]
    model = keras.Sequential([keras.Input((2,)), layer(), keras.layers.Dense(1)], name="m")
    model.compile(loss="mse", optimizer="sgd")
    with pytest.raises(UserError, match=message):
        fit(model, np.zeros((8, 2)), np.zeros((8, 1)), mesh="data=8", verbose=0)


def test_strings_in_batches():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
    dataset = tf.data.Dataset.from_tensors((tf.zeros((8, 2)), tf.fill([8, 1], "a")))
    with pytest.raises(UserError, match="array 1 of a batch has strings"):
        fit(model, dataset, mesh="data=8", verbose=0)


def test_an_axis_that_splits_nothing_is_told(caplog):
    fit_cnn(mesh="data=4,model=2", epochs=1)
    assert "no weight is split over axis model" in caplog.text
