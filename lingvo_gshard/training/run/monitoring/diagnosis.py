"""Finds the layer at which a training step became non-finite."""

from __future__ import annotations

from collections.abc import Sequence

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tracing.non_finite import INFINITY, NAN, Origins, watching_origins
from lingvo_gshard.data.batching.packing import PackedBatch
from lingvo_gshard.data.input import Batch
from lingvo_gshard.training.run.monitoring.divergence import advice
from lingvo_gshard.training.run.monitoring.metrics import Row
from lingvo_gshard.training.run.signals import TrainingFailedError
from lingvo_gshard.training.step.micro_batches import TensorBatch
from lingvo_gshard.training.step.trainer import Trainer


class NonFiniteError(TrainingFailedError):
    """The loss or the gradient of a training step is not finite."""

    @classmethod
    def at(
        cls, step: int, row: Row, where: str, checkpoints: Sequence[int], params: Params
    ) -> NonFiniteError:
        """Returns the error of a step.

        Args:
          step: number of the step, from 1.
          row: its metrics.
          where: what `diagnose` says.
          checkpoints: the steps that have a checkpoint, ascending.
          params: the trainer's Params.
        """
        last = (
            f"the last good checkpoint is step {checkpoints[-1]:,}"
            if checkpoints
            else "no checkpoint was saved yet"
        )
        return cls(
            f"step {step:,}: loss {row['loss']}, gradient norm {row['gradient_norm']}: {where}; "
            f"{last}. {advice(params, row)}"
        )


def diagnose(trainer: Trainer, theta: NestedMap, batch: Batch | TensorBatch, step: int) -> str:
    """Says where a step became non-finite.

    Repeats the step eagerly. Names the first layer in forward order whose output is not finite, or
    the weights whose gradients are not, and the operation and line that made the first NaN or
    infinity of finite values.

    Args:
      trainer: the trainer of the step.
      theta: the weights before the step.
      batch: the batch of the step.
      step: number of the step, from 1.

    Returns:
      A clause for an error message.
    """
    first: list[tuple[str, tf.Tensor]] = []

    def observe(path: str, output: tf.Tensor) -> None:
        if not first and not _finite(output):
            layer, _, _ = path.partition("/")
            first.append((layer, output))

    theta = theta.transform(tf.convert_to_tensor)
    whole = batch.whole() if isinstance(batch, PackedBatch) else batch
    tensors = {name: tf.convert_to_tensor(value) for name, value in whole.items()}
    key = tf.constant([trainer.p.seed & 0x7FFFFFFF, step], tf.int32)
    with watching_origins() as origins:
        loss, _, gradients = trainer.gradients(theta, tensors, key, on_output=observe)
    if first:
        layer, output = first[0]
        found = f"the first layer whose output is not finite is {layer}"
        return found + (_in_weights(theta, layer) or _origin(origins, output, layer))
    if not _finite(loss):
        found = "the outputs of all layers are finite, but the loss is not"
        return found + _origin(origins, loss)
    wrong = [path for path, gradient in gradients.flatten_items() if not _finite(gradient)]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        found = f"the loss is finite, but the gradient is not for {', '.join(wrong[:5])}{more}"
        by_path = dict(gradients.flatten_items())
        return found + _origin(origins, by_path[wrong[0]])
    return "the step is finite when it is repeated without XLA, so the compiled step overflows"


def _in_weights(theta: NestedMap, layer: str) -> str:
    """Returns a clause on weights of a layer that are not finite before the step, or ""."""
    wrong = [
        path
        for path, weight in theta.flatten_items()
        if path.startswith(f"{layer}.") and not _finite(weight)
    ]
    return f": before the step, its weight {wrong[0]} is not finite either" if wrong else ""


def _origin(origins: Origins, value: tf.Tensor, layer: str = "") -> str:
    """Returns a clause on the operation that made a value non-finite, or ""."""
    kind = NAN if bool(tf.reduce_any(tf.math.is_nan(value))) else INFINITY
    *before, origin = origins.history(kind, layer) or origins.history(kind) or [None]
    if origin is None:
        return ""
    where = f", in {origin.layer}" if origin.layer not in ("", layer) else ""
    cause = f"; before it, {before[0]}" if before else ""
    return f": {origin}{where}{cause}"


def _finite(value: tf.Tensor) -> bool:
    if not value.dtype.is_floating:
        return True
    return bool(tf.reduce_all(tf.math.is_finite(value)))
