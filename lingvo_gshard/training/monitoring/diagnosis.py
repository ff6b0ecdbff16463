"""Finds out, after the fact, where a training step left the finite numbers."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.micro_batches import TensorBatch
from lingvo_gshard.training.trainer import Trainer


class NonFiniteError(RuntimeError):
    """A training step whose loss or gradient is not finite."""


def diagnose(trainer: Trainer, theta: NestedMap, batch: TensorBatch, step: int) -> str:
    """Returns a sentence that names where a step stopped being finite.

    Repeats the step eagerly from the weights before it and names the first layer, in forward order,
    whose observed output is not finite; if all are, the weights whose gradient is not.

    step: counts from 1, as in the metrics.
    """
    first: list[str] = []

    def look(path: str, output: tf.Tensor) -> None:
        if not first and not _finite(output):
            layer, _, _ = path.partition("/")
            first.append(layer)

    theta = theta.transform(tf.convert_to_tensor)
    batch = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
    key = tf.constant([trainer.p.seed & 0x7FFFFFFF, step], tf.int32)
    loss, _, gradients = trainer.gradients(theta, batch, key, on_output=look)
    if first:
        return f"the first layer whose output is not finite is {first[0]}"
    if not _finite(loss):
        return "every layer's output is finite, the loss made of them is not"
    wrong = [path for path, gradient in gradients.flatten_items() if not _finite(gradient)]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        return f"the loss is finite, the gradient is not for {', '.join(wrong[:5])}{more}"
    return "repeated step by step it is finite, so the compiled step overflows where that does not"


def _finite(value: tf.Tensor) -> bool:
    if not value.dtype.is_floating:
        return True
    return bool(tf.reduce_all(tf.math.is_finite(value)))
