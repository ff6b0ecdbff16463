"""Defines a task that trains eagerly with low-precision activations."""

import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import einsum
from lingvo_gshard.tasks.task import Task
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Constant
from lingvo_gshard.training.step.trainer import Trainer
from tests import tiny

HIDDEN = 8


class MixedTask(Task):
    """Two matrix products on the batches of tests/tiny.py. Only the loss is float32."""

    ACTIVATION_DTYPES = ("float32", "bfloat16", "float16")

    def __init__(self, params, path=""):
        super().__init__(params, path)
        sizes = {"M": tiny.INPUTS, "H": HIDDEN, "V": tiny.CLASSES}
        self.create_variable("w_in", "MH", sizes, initializers.fan_in(tiny.INPUTS))
        self.create_variable("w_out", "HV", sizes, initializers.fan_in(HIDDEN))

    @layer_method
    def loss(self, theta, batch):
        dtype = self.p.fprop_dtype or "float32"
        x_BM = tf.cast(batch["x"], dtype)
        h_BH = tf.nn.relu(einsum("BM,MH->BH", x_BM, tf.cast(theta.w_in, dtype)))
        logits_BV = einsum("BH,HV->BV", h_BH, tf.cast(theta.w_out, dtype))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            batch["y"], tf.cast(logits_BV, tf.float32)
        )
        return tf.reduce_mean(losses), NestedMap(loss=(tf.reduce_mean(losses), tf.constant(16.0)))


def trainer_params(**values) -> Params:
    schedule = Constant.params().set(learning_rate=0.03)
    return Trainer.params().set(optimizer=Adam.params(), schedule=schedule, **values)


def trainer(**values) -> Trainer:
    """Returns a trainer of the task with these hyperparameters."""
    return trainer_params(**values).instantiate(MixedTask.params())
