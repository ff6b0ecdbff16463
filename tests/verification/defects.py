"""A small task with one layer that can be wrong on a mesh, in ways that users' layers are."""

from __future__ import annotations

from lingvo_gshard.core import context, initializers, random_numbers
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate, einsum
from lingvo_gshard.sharding.collectives import axis_index, psum, rotate
from lingvo_gshard.sharding.manual import manual
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.run.options import RunOptions
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer
from tests.tiny import CLASSES, INPUTS, TinyInput

MESH, STRATEGY = "data=4,model=2", "B->data; H->model"
ROWS, HIDDEN = 16, 8


class Suspect(Layer):
    """Computes tanh(x w_in) w_out in a manual region; correct as it is."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("dropout_rate", 0.0, "Share of the outputs that is dropped.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        sizes = {"M": INPUTS, "H": HIDDEN}
        self.create_variable("w_in", "MH", sizes, initializers.fan_in(INPUTS))
        self.create_variable("w_out", "HM", sizes, initializers.fan_in(HIDDEN))

    @layer_method
    def fprop(self, theta: NestedMap, x_BM: tf.Tensor) -> tf.Tensor:
        seed = self.random_seed("suspect")
        splits = ["BM", "MH", "HM", ((),)]
        region = manual(self.on_device, splits, "BM")
        return region(annotate(x_BM, "BM"), theta.w_in, theta.w_out, seed)

    def on_device(self, x_BM, w_in_MH, w_out_HM, seed):
        return self.product(x_BM, w_in_MH, w_out_HM)

    def product(self, x_BM, w_in_MH, w_out_HM):
        return psum(tf.tanh(x_BM @ w_in_MH) @ w_out_HM, "model")


class MissingSum(Suspect):
    """Forgets to sum over the parts of H."""

    def product(self, x_BM, w_in_MH, w_out_HM):
        return tf.tanh(x_BM @ w_in_MH) @ w_out_HM


class MaskPerDevice(Suspect):
    """Means to hide the first two rows of the batch, and hides those of each device."""

    def on_device(self, x_BM, w_in_MH, w_out_HM, seed):
        is_seen = tf.cast(tf.range(x_BM.shape[0]) >= 2, x_BM.dtype)
        return self.product(x_BM, w_in_MH, w_out_HM) * is_seen[:, None]


class SameKeyForOtherRows(Suspect):
    """Draws one mask of dropout for the rows of all devices."""

    def key(self, seed):
        return seed

    def on_device(self, x_BM, w_in_MH, w_out_HM, seed):
        y_BM = self.product(x_BM, w_in_MH, w_out_HM)
        if not self.p.dropout_rate:
            return y_BM
        uniform_BM = random_numbers.hashed_uniform(y_BM.shape.as_list(), self.key(seed))
        return tf.where(uniform_BM >= self.p.dropout_rate, y_BM, 0.0)


class OtherKeyForSameRows(SameKeyForOtherRows):
    """Draws another mask of dropout on each of the devices that hold copies of the same rows."""

    def key(self, seed):
        return random_numbers.hashed_fold_in_word(seed, axis_index("model"))


class LossSummed(Suspect):
    """Sums the means of an auxiliary loss over devices, where their mean is meant."""

    @layer_method
    def fprop(self, theta: NestedMap, x_BM: tf.Tensor) -> tf.Tensor:
        size = manual(
            lambda x_BM: psum(tf.reduce_mean(tf.square(x_BM))[None], "data"), ["BM"], ((),)
        )(annotate(x_BM, "BM"))
        self.add_loss("size", size[0])
        return super().fprop(theta, x_BM)


@custom_gradient
def sum_gradient(w: tf.Tensor):
    """Returns w; sums its gradient over the devices, which the region's end does, too."""
    return tf.identity(w), lambda d: psum(d, "data")


class GradientSummedTwice(Suspect):
    """Sums the gradient of a weight over the devices of the batch by hand."""

    def on_device(self, x_BM, w_in_MH, w_out_HM, seed):
        return self.product(x_BM, w_in_MH, sum_gradient(w_out_HM))


@custom_gradient
def rotate_gradient(w: tf.Tensor):
    """Returns w; gives its gradient to the next device."""
    return tf.identity(w), lambda d: rotate(d, "model")


class GradientOfNeighbor(Suspect):
    """Sends the gradients of a weight's parts to the wrong devices."""

    def on_device(self, x_BM, w_in_MH, w_out_HM, seed):
        return self.product(x_BM, w_in_MH, rotate_gradient(w_out_HM))


class SuspectTask(Task):
    """A product, the suspect, another product, and a softmax."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("suspect", Suspect.params(), "The layer under suspicion.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.create_child("first", Suspect.params())
        self.create_child("suspect", params.suspect)
        sizes = {"M": INPUTS, "V": CLASSES}
        self.create_variable("w_logits", "MV", sizes, initializers.fan_in(INPUTS))

    def id_ranges(self):
        return {"y": CLASSES}

    @layer_method
    def loss(self, theta, batch):
        x_BM = self.first.fprop(theta.first, annotate(batch["x"], "BM"))
        x_BM = self.suspect.fprop(theta.suspect, x_BM)
        logits_BV = einsum("BM,MV->BV", x_BM, theta.w_logits)
        losses_B = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits_BV)
        loss = tf.reduce_mean(losses_B)
        context.current().add_metric("rows", float(ROWS))
        return loss + self.layer_losses(), NestedMap(cross_entropy=(loss, tf.constant(1.0)))


def experiment(suspect: type[Suspect], dropout_rate: float = 0.5) -> Params:
    """Returns an experiment with a layer of this class."""
    step = Trainer.params().set(
        optimizer=Adam.params(),
        schedule=Linear.params().set(learning_rate=0.03, warmup_steps=2, total_steps=40),
    )
    run = RunOptions.params().set(steps=10)
    layer = suspect.params().set(dropout_rate=dropout_rate)
    return Experiment.params().set(
        name=f"test.{suspect.__name__}",
        task=SuspectTask.params().set(suspect=layer),
        input=TinyInput.params().set(rows=ROWS),
        step=step,
        run=run,
    )
