"""A task, an input and an experiment that train in a second."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from lingvo_gshard.core import context, initializers, random_numbers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.input import Input
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.run.options import RunOptions
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.facts.flops import flops

INPUTS, HIDDEN, CLASSES = 6, 8, 5


class TinyDense(Layer):
    """Computes x w + b, then applies dropout."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("sizes", (INPUTS, HIDDEN), "Inputs and outputs.")
        p.define("dropout", 0.1, "Share of outputs dropped in training.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        sizes = dict(zip("MH", params.sizes, strict=True))
        self.create_variable("w", "MH", sizes, initializers.fan_in(params.sizes[0]))
        self.create_variable("b", "H", sizes, initializers.constant(0.0))

    @layer_method
    def fprop(self, theta, x_BM, training):
        y_BH = tf.matmul(x_BM, theta.w) + theta.b
        if training and self.p.dropout:
            key = self.random_seed("dropout")
            kept = random_numbers.uniform(y_BH.shape, key) >= self.p.dropout
            y_BH = tf.where(kept, y_BH, 0.0)
        return self.observe(y_BH)


@flops.register(TinyDense)
def dense_flops(layer, shape):
    return 2 * shape.tokens * layer.p.sizes[0] * layer.p.sizes[1]


class TinyTask(Task):
    """Two dense layers that learn the index of the largest input."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("hidden", TinyDense.params(), "First layer.")
        p.define(
            "output", TinyDense.params().set(sizes=(HIDDEN, CLASSES), dropout=0.0), "Second layer."
        )
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        self.create_child("hidden", params.hidden)
        self.create_child("output", params.output)

    def id_ranges(self):
        return {"y": CLASSES}

    @layer_method
    def loss(self, theta, batch):
        training = context.current().training
        hidden_BH = tf.nn.relu(self.hidden.fprop(theta.hidden, batch["x"], training))
        logits_BV = self.output.fprop(theta.output, hidden_BH, training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits_BV)
        loss = tf.reduce_mean(losses)
        right = tf.cast(tf.argmax(logits_BV, -1, tf.int32) == batch["y"], tf.float32)
        tokens = tf.cast(tf.size(batch["y"]), tf.float32)
        self.add_metric("hidden_mean", tf.reduce_mean(hidden_BH))
        metrics = NestedMap(
            loss=(loss, tokens),
            cross_entropy=(loss, tokens),
            accuracy=(tf.reduce_mean(right), tokens),
            tokens=(tokens, tf.constant(1.0)),
        )
        return loss, metrics


class TinyBatches:
    """Random batches that depend on (seed, index). The state is the index of the next batch."""

    def __init__(self, params: Params, seed: int):
        self._p = params
        self._seed = seed
        self._index = 0

    def __iter__(self):
        return self

    def __next__(self):
        batch = make_batch(self._seed, self._index, self._p.rows)
        if self._index + 1 == self._p.poisoned_batch:
            batch["x"][0, 0] = np.inf
        self._index += 1
        return batch

    def get_state(self):
        return {"index": self._index}

    def set_state(self, state):
        self._index = state["index"]

    def close(self):
        pass


class TinyInput(Input):
    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("rows", 16, "Rows of a batch.")
        p.define("poisoned_batch", 0, "The batch, counted from 1, that holds an infinity.")
        p.define("splits", ("train", "dev"), "The splits there are.")
        p.define("unreadable", (), "The splits that cannot be read.")
        return p

    @classmethod
    def batch_specs(cls, params):
        x = tf.TensorSpec((params.rows, INPUTS), tf.float32)
        return {"x": x, "y": tf.TensorSpec((params.rows,), tf.int32)}

    @property
    def splits(self):
        return self.p.splits

    def check_split(self, split):
        if split in self.p.unreadable:
            raise ValueError(f"{split}.tsv:3: no three columns")

    def save_vocabularies(self, directory):
        (pathlib.Path(directory) / "words.json").write_text(json.dumps(list("abcde")))

    def load_vocabularies(self, directory):
        assert json.loads((pathlib.Path(directory) / "words.json").read_text()) == list("abcde")

    def train_batches(self, seed):
        return TinyBatches(self.p, seed)

    def evaluation_batches(self, split):
        self.check_split(split)
        return [make_batch(7, index, self.p.rows) for index in range(3)]


def make_batch(seed: int, index: int, rows: int = 16) -> dict[str, np.ndarray]:
    generator = np.random.default_rng([seed, index])
    x_BM = generator.normal(size=(rows, INPUTS)).astype(np.float32)
    return {"x": x_BM, "y": (np.argmax(x_BM, -1) % CLASSES).astype(np.int32)}


def experiment_params(steps: int = 12) -> Params:
    step = Trainer.params().set(
        clip_norm=1.0,
        optimizer=Adam.params(),
        schedule=Linear.params().set(learning_rate=0.03, warmup_steps=2, total_steps=40),
    )
    run = RunOptions.params().set(steps=steps, log_every_steps=5, checkpoint_every_steps=4)
    return Experiment.params().set(
        name="test.tiny", task=TinyTask.params(), input=TinyInput.params(), step=step, run=run
    )


def set_options(params: Params, **values: object) -> None:
    """Sets options of the run or of the step, whichever has them."""
    for name, value in values.items():
        part = params.run if name in params.run else params.step
        part.set(**{name: value})
