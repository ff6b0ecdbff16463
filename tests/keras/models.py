"""Small compiled Keras models, and training step by step."""

import keras
import numpy as np

from lingvo_gshard.keras import gshard_layer
from lingvo_gshard.layers.moe import MixtureOfExperts

ROWS, LENGTH, WORDS, CLASSES = 32, 8, 24, 4


def compiled(model, optimizer=None, **options):
    """Returns the model, compiled for XLA, with a loss and metrics."""
    model.compile(
        optimizer=optimizer or keras.optimizers.AdamW(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=True,
        **options,
    )
    return model


def cnn(**options):
    """Convolutions with batch norm, dropout and a regularizer."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, activation="relu", kernel_regularizer="l2", name="conv"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(16, activation="relu", name="hidden"),
            layers.Dense(CLASSES, name="out"),
        ],
        name="cnn",
    )
    return compiled(model, **options)


def dense(**options):
    """Dense layers with batch norm, dropout and a regularizer, which compile fast."""
    keras.utils.set_random_seed(4)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(16, activation="relu", kernel_regularizer="l2", name="hidden"),
            layers.BatchNormalization(),
            layers.Dropout(0.25),
            layers.Dense(CLASSES, name="out"),
        ],
        name="dense",
    )
    return compiled(model, **options)


def lstm(**options):
    """A recurrent classifier of token ids."""
    keras.utils.set_random_seed(2)
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 8, name="words")(ids)
    x = keras.layers.LSTM(16, name="lstm")(x)
    return compiled(
        keras.Model(ids, keras.layers.Dense(CLASSES, name="out")(x), name="r"), **options
    )


def grouped_cnn(**options):
    """Depthwise, separable and grouped convolutions, and max pooling."""
    keras.utils.set_random_seed(6)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, padding="same", name="conv"),
            layers.DepthwiseConv2D(3, strides=2, activation="relu", name="depthwise"),
            layers.SeparableConv2D(8, 2, name="separable"),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 1, groups=2, name="grouped"),
            layers.Flatten(),
            layers.Dense(CLASSES, name="out"),
        ],
        name="grouped_cnn",
    )
    return compiled(model, **options)


def stateful(**options):
    """Recurrent layers whose states last from batch to batch, of 8 rows."""
    keras.utils.set_random_seed(7)
    layers = keras.layers
    ids = keras.Input((LENGTH,), batch_size=8, dtype="int32")
    x = layers.Embedding(WORDS, 8, name="words")(ids)
    x = layers.LSTM(8, return_sequences=True, stateful=True, name="lstm")(x)
    x = layers.Bidirectional(layers.GRU(8, stateful=True, name="gru"))(x)
    return compiled(keras.Model(ids, layers.Dense(CLASSES, name="out")(x), name="s"), **options)


class Transformer(keras.Model):
    """A subclassed classifier of tokens, with attention and an optional mixture of experts."""

    def __init__(self, experts=0):
        super().__init__(name="transformer")
        layers = keras.layers
        self.words = layers.Embedding(WORDS, 16, name="words")
        self.attention = layers.MultiHeadAttention(4, 4, dropout=0.1, name="attention")
        self.norm = layers.LayerNormalization(name="norm")
        if experts:
            params = MixtureOfExperts.params().set(
                model_dim=16, hidden_dim=32, num_experts=experts, group_size=LENGTH
            )
            self.feed_forward = [gshard_layer(params, "moe")]
        else:
            up = layers.Dense(32, activation="gelu", name="up")
            self.feed_forward = [up, layers.Dense(16, name="down")]
        self.out = layers.Dense(WORDS, name="out")

    def call(self, ids, training=False):
        x = self.words(ids)
        x = self.norm(x + self.attention(x, x, training=training))
        h = x
        for layer in self.feed_forward:
            h = layer(h)
        return self.out(x + h)


def transformer(experts=0, **options):
    """The Transformer, compiled."""
    keras.utils.set_random_seed(3)
    return compiled(Transformer(experts), **options)


def images():
    """Returns images and classes."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((ROWS, 8, 8, 1)).astype(np.float32)
    return x, draw.integers(0, CLASSES, ROWS)


def rows():
    """Returns rows of ids and the classes of the rows."""
    draw = np.random.default_rng(0)
    return draw.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32), draw.integers(0, CLASSES, ROWS)


def tokens():
    """Returns rows of ids and the next ids."""
    ids, _ = rows()
    return ids, (ids + 1) % WORDS


class Recorder(keras.callbacks.Callback):
    """Keeps the logs of each step."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in logs.items()})


def largest_difference(one, other):
    """Returns the largest difference of two models' variables, and of their optimizers'."""
    pairs = [(one.variables, other.variables), (one.optimizer.variables, other.optimizer.variables)]
    return max(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
        for mine, its in pairs
        for a, b in zip(mine, its, strict=True)
    )
