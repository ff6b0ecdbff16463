# tests: keras/fitting.py, keras/layouts.py, keras/mesh_steps.py, keras/model_state.py
# tests: keras/step_programs.py, keras/gshard_layer.py, runtime/lowering/variables.py
"""Compares training over a mesh with Keras on one device, step by step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from tests.keras import models
from tests.keras.models import Recorder, largest_difference

# Weights of the second dense layer are split along their inputs, which are then summed.
TENSOR = {r".*/(hidden|up)/kernel": (None, "model"), r".*/(out|down)/kernel": ("model", None)}
ARGUMENTS = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def slow(name, make, data, **options):
    """Returns a case that takes long to compile."""
    return pytest.param(make, data, options, id=name, marks=pytest.mark.slow)


def train_both(make, data, options, **arguments):
    """Trains a model on one device by Keras and another one over a mesh; compares every step."""
    plain, ours = make(), make()
    logs = Recorder(), Recorder()
    arguments = {**ARGUMENTS, "validation_data": data, **arguments}
    # Subclassed models draw their weights when they see the first batch.
    keras.utils.set_random_seed(5)
    expected = plain.fit(*data, callbacks=[logs[0]], **arguments)
    keras.utils.set_random_seed(5)
    found = lingvo_gshard.keras.fit(ours, *data, **options, callbacks=[logs[1]], **arguments)
    assert len(logs[0].logs) == len(logs[1].logs) > 0
    for mine, its in zip(logs[1].logs, logs[0].logs, strict=True):
        assert mine == pytest.approx(its, rel=2e-4, abs=1e-5)
    assert found.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        assert found.history[name] == pytest.approx(values, rel=2e-4, abs=1e-5)
    assert largest_difference(ours, plain) < 2e-4
    return plain, ours


FEED_FORWARD = {r".*up/kernel": "MH", r".*up/bias": "H", r".*down/kernel": "HM"}


@pytest.mark.parametrize(
    ("make", "data", "options"),
    [
        (models.dense, models.images, {"mesh": "data=4,model=2", "layout": TENSOR}),
        # Nothing is split over `model`.
        (models.grouped_cnn, models.images, {"mesh": "data=2,model=2"}),
        slow("groups", models.grouped_cnn, models.images, mesh="data=2,model=4", strategy="fsdp"),
        slow(
            "groups_shardy", models.grouped_cnn, models.images, mesh="a=2,b=2", partitioner="shardy"
        ),
        slow("cnn", models.cnn, models.images, mesh="data=4,model=2", layout=TENSOR),
        slow("lstm_fsdp", models.lstm, models.rows, mesh="data=8", strategy="fsdp"),
        slow(
            "lstm_letters",
            models.lstm,
            models.rows,
            mesh="data=4,model=2",
            layout={".*lstm_cell/.*kernel": "MH"},
            strategy="data_tensor",
        ),
        slow(
            "transformer",
            models.transformer,
            models.tokens,
            mesh="data=4,model=2",
            layout=FEED_FORWARD,
            strategy="data_tensor",
        ),
        slow(
            "mixture_of_experts",
            lambda: models.transformer(8),
            models.tokens,
            mesh="data=8",
            strategy="expert",
        ),
    ],
)
def test_every_step_is_that_of_one_device(make, data, options):
    train_both(make, data(), options)


@pytest.mark.slow
def test_callbacks_see_and_set_the_variables_of_the_devices():
    x, y = models.images()
    data = {"x": x, "y": y, **ARGUMENTS, "epochs": 4}

    def callbacks():
        def halve(epoch, rate):
            return rate * 0.5 if epoch else rate

        seen = []
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(
                float(keras.ops.sum(model.get_layer("out").kernel))
            )
        )
        stop = keras.callbacks.EarlyStopping("loss", patience=0, restore_best_weights=True)
        return seen, [keras.callbacks.LearningRateScheduler(halve), watch, stop]

    ran = []
    for train in (keras.Model.fit, lingvo_gshard.keras.fit):
        model = models.dense()
        seen, given = callbacks()
        more = {} if train is keras.Model.fit else {"mesh": "data=4,model=2", "layout": TENSOR}
        history = train(model, callbacks=given, **data, **more)
        ran.append((model, seen, history.history["learning_rate"]))
    (plain, its, rates), (ours, mine, our_rates) = ran
    assert rates == our_rates and rates[1] == rates[0] / 2
    assert mine == pytest.approx(its, rel=1e-3) and len(set(mine)) == len(mine)
    assert largest_difference(ours, plain) < 2e-4


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=1.0),
        lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
        lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(1e-2, 8), use_ema=True, ema_overwrite_frequency=3
        ),
        lambda: keras.optimizers.Adafactor(1e-2),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2)),
    ],
    ids=["sgd", "accumulation", "ema", "adafactor", "loss_scale"],
)
@pytest.mark.slow
def test_optimizers_are_those_of_keras(optimizer):
    options = {"mesh": "data=4,model=2", "layout": TENSOR}
    train_both(lambda: models.dense(optimizer=optimizer()), models.images(), options)


@pytest.mark.slow
def test_plain_keras_goes_on_with_the_weights(tmp_path):
    x, y = models.images()
    model = models.dense()
    lingvo_gshard.keras.fit(model, x, y, mesh="data=8", **ARGUMENTS)
    path = tmp_path / "cnn.weights.h5"
    model.save_weights(path)
    other = models.dense()
    other.load_weights(path)
    np.testing.assert_array_equal(other.predict(x, verbose=0), model.predict(x, verbose=0))
    scores = lingvo_gshard.keras.evaluate(other, x, y, mesh="data=8", batch_size=8, verbose=0)
    assert scores == pytest.approx(model.evaluate(x, y, batch_size=8, verbose=0), rel=1e-4)
    assert len(model.fit(x, y, **ARGUMENTS).history["loss"]) == 2


@pytest.mark.slow
def test_a_dataset_with_a_smaller_last_batch():
    x, y = models.images()
    dataset = tf.data.Dataset.from_tensor_slices((x[:28], y[:28])).batch(8)
    model, plain = models.dense(), models.dense()
    found = lingvo_gshard.keras.fit(model, dataset, mesh="data=8", epochs=1, verbose=0)
    expected = plain.fit(dataset, epochs=1, verbose=0)
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-4)
    assert largest_difference(model, plain) < 2e-4


def test_states_of_recurrent_layers_last_from_batch_to_batch():
    options = {"mesh": "data=2,model=2", "layout": {".*/lstm_cell/kernel": (None, "model")}}
    both = train_both(models.stateful, models.rows(), options, validation_data=None)
    expected, found = ([*m.layers[2].states, *m.layers[3].forward_layer.states] for m in both)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-5)


def test_losses_of_outputs_are_weighed_by_rows():
    """As Keras's are with run_eagerly. Compiled, Keras weighs them by batches of any size."""
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    y = {"a": 3 * x[:, :2], "b": x[:, 2:]}

    def made(**options):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        outputs = {
            name: keras.layers.Dense(3 - n, name=name)(inputs) for n, name in ((1, "a"), (2, "b"))
        }
        model = keras.Model(inputs, outputs)
        model.compile("sgd", {"a": "mse", "b": "mae"}, **options)
        return model

    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0}
    found = lingvo_gshard.keras.fit(made(), x, y, mesh="data=2", **arguments).history
    by_rows = made(run_eagerly=True).fit(x, y, **arguments).history
    by_batches = made(jit_compile=True).fit(x, y, **arguments).history
    for name, values in by_rows.items():
        assert found[name] == pytest.approx(values, rel=1e-4)
    assert found["loss"] == pytest.approx(by_batches["loss"], rel=1e-4)
    assert found["a_loss"] != pytest.approx(by_batches["a_loss"], rel=1e-2)
