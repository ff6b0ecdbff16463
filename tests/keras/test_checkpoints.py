# tests: keras/checkpoints.py, keras/mesh_state.py, keras/model_state.py
"""Tests that training resumes from its checkpoints bit for bit, also under another mesh."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.keras import Checkpoints, evaluate, fit
from tests.keras import models
from tests.keras.models import largest_difference

TENSOR = {r".*/hidden/kernel": (None, "model"), r".*/out/kernel": ("model", None)}
MESH = {"mesh": "data=4,model=2", "layout": TENSOR}
ARGUMENTS = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}


class StoppedError(Exception):
    """Ends training as a crash does."""


class StopAt(keras.callbacks.Callback):
    """Ends training after a number of steps."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise StoppedError


def plateau():
    """Returns a callback that changes the learning rate at the ends of epochs."""
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)


# 4 steps are an epoch.
@pytest.mark.parametrize(
    ("stop", "every", "resumed"),
    [
        (7, 3, 6),
        (6, 0, 4),
        # The end of an epoch is saved again, after callbacks have changed the state.
        (9, 4, 8),
    ],
)
@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, stop, every, resumed):
    x, y = models.images()
    whole = models.dense()
    history = fit(whole, x, y, callbacks=[plateau()], **MESH, **ARGUMENTS).history
    saves = Checkpoints(tmp_path / "run", every_steps=every)
    with pytest.raises(StoppedError):
        callbacks = [plateau(), StopAt(stop)]
        fit(models.dense(), x, y, callbacks=callbacks, checkpoints=saves, **MESH, **ARGUMENTS)
    again, steps = models.dense(), []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(logs)
    )
    callbacks = [plateau(), count]
    found = fit(again, x, y, callbacks=callbacks, checkpoints=saves, **MESH, **ARGUMENTS).history
    assert sum(bool(logs) for logs in steps) == 12 - resumed
    assert largest_difference(again, whole) == 0.0
    for name, values in found.items():
        assert values == history[name][-len(values) :]


@pytest.mark.slow
def test_training_resumes_under_another_mesh(tmp_path):
    x, y = models.images()
    saves = Checkpoints(tmp_path / "run")
    whole = models.dense()
    fit(whole, x, y, **MESH, **ARGUMENTS)
    fit(models.dense(), x, y, checkpoints=saves, **MESH, **{**ARGUMENTS, "epochs": 2})
    other = models.dense()
    fit(other, x, y, checkpoints=saves, mesh="data=2", **ARGUMENTS)
    assert largest_difference(other, whole) < 1e-4


def test_checkpoints_of_another_model_are_refused(tmp_path):
    x, y = models.images()
    saves = Checkpoints(tmp_path / "run")
    fit(models.dense(), x, y, checkpoints=saves, mesh="data=2", **{**ARGUMENTS, "epochs": 1})
    keras.utils.set_random_seed(1)
    other = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(4, name="one")]
    )
    with pytest.raises(UserError, match="has no variable theta.*at this place"):
        fit(models.compiled(other), x, y, checkpoints=saves, mesh="data=2", **ARGUMENTS)
    with pytest.raises(UserError, match="`checkpoints.keep=0`; expected 1 or more"):
        Checkpoints(tmp_path, keep=0)
    assert np.isfinite(other.get_weights()[0]).all()


class Ends(keras.callbacks.Callback):
    """Keeps the first weights that callbacks see at the beginning and at the end of training."""

    def on_train_begin(self, logs=None):
        self.first = self.model.get_weights()

    def on_train_end(self, logs=None):
        self.last = self.model.get_weights()


def averaging():
    """Returns a model whose weights `fit` replaces by their averages at its end."""
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    return models.dense(optimizer=optimizer)


class Unbuilt(keras.Model):
    """A subclassed model, which has no weights before it sees a batch."""

    def __init__(self):
        super().__init__(name="unbuilt")
        self.flat, self.out = keras.layers.Flatten(), keras.layers.Dense(models.CLASSES)

    def call(self, x):
        return self.out(self.flat(x))


def unbuilt():
    keras.utils.set_random_seed(5)
    return models.compiled(Unbuilt())


@pytest.mark.parametrize(
    "make",
    [
        models.dense,
        pytest.param(averaging, marks=pytest.mark.slow),
        pytest.param(unbuilt, marks=pytest.mark.slow),
    ],
)
def test_a_finished_run_restores_its_weights(tmp_path, make):
    x, y = models.images()
    saves, whole, again, ends = Checkpoints(tmp_path / "run"), make(), make(), Ends()
    arguments = {**ARGUMENTS, "epochs": 1, "mesh": "data=2", "checkpoints": saves}
    fit(whole, x, y, **arguments)
    history = fit(again, x, y, callbacks=[ends], **arguments)
    assert history.history == {} and history.epoch == []
    assert largest_difference(again, whole) == 0.0
    for one, other in zip(ends.last, whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(again.predict(x, verbose=0), whole.predict(x, verbose=0))
    assert evaluate(again, x, y, mesh="data=2", verbose=0) == evaluate(
        whole, x, y, mesh="data=2", verbose=0
    )
    # One epoch more goes on from there, and fewer epochs than trained are as a finished run.
    more = fit(again, x, y, **{**arguments, "epochs": 2}).history
    assert len(more["loss"]) == 1
    third = make()
    assert fit(third, x, y, **arguments).history == {}
    assert largest_difference(third, again) == 0.0


def test_a_dataset_without_batches_restores_nothing_and_says_so(tmp_path):
    x, y = models.images()
    arguments = {"mesh": "data=2", "checkpoints": Checkpoints(tmp_path / "run"), "verbose": 0}
    model = models.dense()
    fit(model, x, y, batch_size=8, **arguments)
    nothing = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).take(0)
    for epochs in (1, 2):
        with pytest.raises(UserError, match="step 4 in .*run is not restored, because `x` has no"):
            fit(model, nothing, epochs=epochs, **arguments)
