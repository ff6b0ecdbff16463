"""Finds the layer at which a training step became non-finite."""

from __future__ import annotations

from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.micro_batches import TensorBatch
from lingvo_gshard.training.monitoring.failure import TrainingFailedError
from lingvo_gshard.training.trainer import Trainer


class NonFiniteError(TrainingFailedError):
    """The loss or the gradient of a training step is not finite."""


def diagnose(trainer: Trainer, theta: NestedMap, batch: TensorBatch, step: int) -> str:
    """Says where a step became non-finite.

    Repeats the step eagerly. Names the first layer in forward order whose output is not finite, or
    the weights whose gradients are not.

    Args:
      trainer: the trainer of the step.
      theta: the weights before the step.
      batch: the batch of the step.
      step: number of the step, from 1.

    Returns:
      A clause for an error message.
    """
    first: list[str] = []

    def observe(path: str, output: tf.Tensor) -> None:
        if not first and not _finite(output):
            layer, _, _ = path.partition("/")
            first.append(layer)

    theta = theta.transform(tf.convert_to_tensor)
    batch = {name: tf.convert_to_tensor(value) for name, value in batch.items()}
    key = tf.constant([trainer.p.seed & 0x7FFFFFFF, step], tf.int32)
    loss, _, gradients = trainer.gradients(theta, batch, key, on_output=observe)
    if first:
        return f"the first layer whose output is not finite is {first[0]}"
    if not _finite(loss):
        return "the outputs of all layers are finite, but the loss is not"
    wrong = [path for path, gradient in gradients.flatten_items() if not _finite(gradient)]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        return f"the loss is finite, but the gradient is not for {', '.join(wrong[:5])}{more}"
    return "the step is finite when it is repeated without XLA, so the compiled step overflows"


def _finite(value: tf.Tensor) -> bool:
    if not value.dtype.is_floating:
        return True
    return bool(tf.reduce_all(tf.math.is_finite(value)))
