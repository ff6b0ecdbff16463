"""Trains a Keras model with experts over eight devices. Start it again, and it goes on."""

import os
import pathlib
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import lingvo_gshard  # noqa: E402
from lingvo_gshard.layers.moe import MixtureOfExperts  # noqa: E402

WORDS, LENGTH, MODEL, ROWS = 50, 16, 32, 512
MESH = {"mesh": "data=8", "strategy": "expert"}


def make_model():
    """Returns a compiled model that names each row's most frequent class of words."""
    keras.utils.set_random_seed(1)
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, MODEL)(ids)
    x = x + keras.layers.MultiHeadAttention(4, MODEL // 4)(x, x)
    x = keras.layers.LayerNormalization()(x)
    moe = MixtureOfExperts.params().set(
        model_dim=MODEL, hidden_dim=2 * MODEL, num_experts=8, group_size=LENGTH
    )
    x = x + lingvo_gshard.keras.gshard_layer(moe, "experts")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    model = keras.Model(ids, keras.layers.Dense(5)(x), name="rows")
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=True,
    )
    return model


def make_rows():
    """Returns rows of ids and the most frequent class (id modulo 5) of each."""
    ids = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)
    counts = np.stack([(ids % 5 == each).sum(1) for each in range(5)], 1)
    return ids, counts.argmax(1)


def main(directory, epochs):
    """Trains for a number of epochs in all."""
    model, (ids, classes) = make_model(), make_rows()
    found = lingvo_gshard.keras.verify(model, (ids[:32], classes[:32]), **MESH)
    assert found.is_equal, found.first
    history = lingvo_gshard.keras.fit(
        model,
        ids,
        classes,
        **MESH,
        checkpoints=lingvo_gshard.keras.Checkpoints(directory / "checkpoints"),
        batch_size=64,
        epochs=epochs,
        shuffle=False,
        verbose=2,
    )
    model.save_weights(directory / "rows.weights.h5")
    plain = make_model()
    plain.load_weights(directory / "rows.weights.h5")
    scores = plain.evaluate(ids, classes, verbose=0)
    print(f"trained {len(history.epoch)} epochs; plain Keras: loss {scores[0]:.3f}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
