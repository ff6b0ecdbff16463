# tests: wings/functions/partition.py, runtime/lowering/variables.py
"""Runs a Keras model on eight devices with two annotations."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.sharding import annotate
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import partition

B, L, M, H, V = 8, 6, 16, 32, 24


class Classifier(keras.Model):
    """Classifies each token from all tokens of its row."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(V, M)
        self.attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=4)
        self.norm = keras.layers.LayerNormalization()
        self.up = keras.layers.Dense(H, activation="gelu", name="up")
        self.down = keras.layers.Dense(M, name="down")
        self.classes = keras.layers.Dense(V)

    def call(self, ids_BL):
        x_BLM = annotate(self.embedding(ids_BL), "BLM")
        x_BLM = self.norm(x_BLM + self.attention(x_BLM, x_BLM))
        h_BLH = annotate(self.up(x_BLM), "BLH")
        return self.classes(x_BLM + self.down(h_BLH))


@pytest.fixture(scope="module")
def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = Classifier()
    model(np.zeros((B, L), np.int32))
    return model


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, V, (B, L)).astype(np.int32)


def forward(model):
    def call(trainable, non_trainable, ids):
        return model.stateless_call(trainable, non_trainable, ids)[0]

    return call


def step(model):
    """Returns the loss and the gradients of one step."""
    call = forward(model)

    def compute(trainable, non_trainable, ids, labels):
        with tf.GradientTape() as tape:
            tape.watch(trainable)
            logits = call(trainable, non_trainable, ids)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        return loss, [tf.convert_to_tensor(g) for g in tape.gradient(loss, trainable)]

    return compute


def values(variables) -> list[np.ndarray]:
    return [np.asarray(variable) for variable in variables]


@pytest.mark.parametrize(
    ("mesh", "strategy", "moved"),
    [
        ("data=8", "data", {}),
        # The sum over the parts of H, after `down`.
        ("model=8", "tensor", {"all-reduce": 1}),
        ("data=4,model=2", "data_tensor", {"all-reduce": 1}),
    ],
)
def test_partitioned_call_equals_keras(model, ids, mesh, strategy, moved):
    run = partition(forward(model), mesh, strategy)
    arguments = values(model.trainable_variables), values(model.non_trainable_variables), ids
    np.testing.assert_allclose(run(*arguments), model(ids), rtol=1e-4, atol=1e-5)
    found = run.compile(*arguments).collectives()
    assert hlo.count_by_kind(found) == moved
    assert all("down" in collective.op_name for collective in found)


def test_partitioned_gradients_equal_keras(model, ids):
    labels = (ids + 1) % V
    trainable = values(model.trainable_variables)
    expected_loss, expected = step(model)(list(map(tf.constant, trainable)), [], ids, labels)
    run = partition(step(model), "data=4,model=2", "data_tensor")
    loss, gradients = run(trainable, [], ids, labels)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    # `down` forward, `up` backward, and all sums over the batch in one.
    found = run.compile(trainable, [], ids, labels).collectives()
    assert [c.kind for c in found] == ["all-reduce"] * 3
    assert "down" in found[0].op_name and "gradient_tape/up" in found[1].op_name


def test_layouts_shard_weights(model, ids):
    """Layouts shard the two weights with an H; the others are replicated."""
    letters = {"up/kernel": "MH", "up/bias": "H", "down/kernel": "HM"}
    layouts = [
        next((layout for name, layout in letters.items() if v.path.endswith(name)), None)
        for v in model.trainable_variables
    ]
    assert sum(layout is not None for layout in layouts) == 3
    run = partition(forward(model), "model=8", "tensor", layouts=[layouts, None, None])
    arguments = values(model.trainable_variables), [], ids
    np.testing.assert_allclose(run(*arguments), model(ids), rtol=1e-4, atol=1e-5)
    executable = run.compile(*arguments)
    assert hlo.count_by_kind(executable.collectives()) == {"all-reduce": 1}
    total = sum(v.nbytes for v in arguments[0]) + ids.nbytes
    in_parts = 4 * (2 * M * H + H)
    assert executable.memory()["arguments"] == total - in_parts + in_parts // 8


def test_model_passed_directly_is_rejected(model, ids):
    with pytest.raises(ValueError, match="uses variables: .*Make their values arguments, as state"):
        partition(lambda ids: model(ids), "data=8", "data")(ids)


def test_an_axis_that_splits_nothing_is_told(caplog):
    def rows(x):
        return annotate(x, "BM") * 2.0

    x = np.zeros((8, 4), np.float32)
    partition(rows, "data=4,model=2", "data_tensor").lower(x)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "rows: nothing is split over axis model of `mesh=data=4,model=2`" in warning
    assert re.search(r"one of the letters \w*H", warning)
    caplog.clear()
    partition(rows, "data=8", "data").lower(x)
    partition(rows, "data=4,model=2", "data_tensor", layouts=["BH"]).lower(x)
    assert not caplog.records
