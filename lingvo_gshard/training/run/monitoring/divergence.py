"""Notices that a loss diverges, and follows how evenly experts are used."""

from __future__ import annotations

import collections
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.tracing.non_finite import INFINITY, NAN, Origins, watching_origins
from lingvo_gshard.data.batching.packing import PackedBatch
from lingvo_gshard.data.input import Batch
from lingvo_gshard.training.run.monitoring.metrics import MetricsRow, first_and_last, rows_until
from lingvo_gshard.training.run.signals import TrainingFailedError
from lingvo_gshard.training.step.micro_batches import TensorBatch
from lingvo_gshard.training.step.momentum import Momentum
from lingvo_gshard.training.step.trainer import Trainer

# Names of the metrics of layers/moe/load_metrics.py.
LOAD, DROPPED, UTILIZATION, DEAD = (
    "load_max_over_mean",
    "dropped_share",
    "utilization",
    "dead_experts",
)


class ExpertBalance:
    """Summarizes the load metrics of a run; says nothing if the run has no experts.

    A step only appends its row of metrics. Rows are read at the end of a log interval.
    """

    def __init__(self):
        self._layers: list[str] | None = None
        self._rows: list[MetricsRow] = []
        self._last: list[MetricsRow] = []

    def add(self, row: MetricsRow) -> None:
        """Adds the metrics of one step."""
        self._rows.append(row)

    def digest(self, row: MetricsRow) -> str:
        """Returns the worst load of any layer in one step as a short text; '' without experts."""
        layers = self._layers_of(row)
        if not layers:
            return ""
        fullest = max(row[f"{layer}/{LOAD}"] for layer in layers)
        dropped = max(row[f"{layer}/{DROPPED}"] for layer in layers)
        dead = sum(row[f"{layer}/{DEAD}"] for layer in layers)
        words = f"fullest expert {fullest:.2f}x  dropped {dropped:.1%}"
        return f"{words}  dead experts {dead:.0f}" if dead else words

    def end_interval(self) -> None:
        """Ends the interval that `summary` covers."""
        self._last, self._rows = self._rows, []

    def summary(self) -> list[str]:
        """Returns a line for each layer with experts: means over the last complete interval."""
        if not self._last:
            return []

        def mean(name: str) -> float:
            return sum(row[name] for row in self._last) / len(self._last)

        layers = self._layers_of(self._last[0])
        steps = "step" if len(self._last) == 1 else f"{len(self._last):,} steps"
        head = (
            [f"Load of the experts in the last {steps} (1.00x is an even load):"] if layers else []
        )
        return head + [
            f"  {layer}  fullest {mean(f'{layer}/{LOAD}'):.2f}x  "
            f"slots used {mean(f'{layer}/{UTILIZATION}'):.1%}  "
            f"dropped {mean(f'{layer}/{DROPPED}'):.1%}  dead {mean(f'{layer}/{DEAD}'):.1f}"
            for layer in layers
        ]

    def _layers_of(self, row: MetricsRow) -> list[str]:
        """Returns the layers with experts, from the first row: all rows have the same names."""
        if self._layers is None:
            ends = f"/{DEAD}"
            self._layers = [name.removesuffix(ends) for name in row if name.endswith(ends)]
        return self._layers


# The median of so many steps is compared, so that single spikes do not count.
_SHORT, LONG = 5, 20
# The loss has diverged if the median of the last _SHORT losses exceeds this multiple of the loss of
# an untrained model, or ...
_FAR_ABOVE_START = 3.0
# ... if the median of the last LONG cross-entropies exceeds this multiple of the same loss.
_WORSE_THAN_GUESSING = 1.25
# Advice calls a learning rate high above these limits. Updates of most optimizers have the size of
# the rate; updates of `Momentum` are multiples of the gradient, so its limit is higher.
_USUAL_RATE, _USUAL_RATE_OF_GRADIENTS = 0.05, 10.0


class Divergence:
    """Watches the loss of a run.

    The loss has diverged once it is far above the larger of the first step's loss and the loss of
    guessing, or once the model has been worse than guessing for some time. The loss has recovered
    when it has been below both for some time.

    Attributes:
      since: the step that showed the divergence; None if the loss has not diverged, or has
        recovered.
    """

    def __init__(self, params: Params, guessing_loss: float | None = None):
        """Makes the watch of one run.

        Args:
          params: the trainer's Params, for advice.
          guessing_loss: cross-entropy of guessing evenly, in nats; None if it is unknown.
        """
        self._params = params
        self._guessing = guessing_loss
        self._first: tuple[int, float] | None = None
        self._lowest = (0, math.inf)
        self._losses: collections.deque[float] = collections.deque(maxlen=LONG)
        self._entropies: collections.deque[float] = collections.deque(maxlen=LONG)
        self._last: tuple[int, MetricsRow] = (0, {})
        self.since: int | None = None

    def resume(self, rows: Iterable[tuple[int, MetricsRow]]) -> None:
        """Adds (step, metrics) of the first step and of the last steps before a resume."""
        for step, row in rows:
            self.add(step, row)

    def add(self, step: int, row: MetricsRow) -> str:
        """Adds the metrics of a step. Returns a line to show, '' if there is nothing new to say."""
        loss = row.get("loss")
        # With a loss scale, steps that are not finite are skipped.
        if loss is None or not math.isfinite(loss):
            return ""
        self._first = self._first or (step, loss)
        self._lowest = min(self._lowest, (step, loss), key=lambda pair: pair[1])
        self._losses.append(loss)
        self._entropies.append(row.get("cross_entropy", loss))
        self._last = step, row
        diverged, before = self._is_diverged(), self.since
        if diverged and before is None:
            self.since = step
            return f"Warning: step {step:,}: the loss has diverged: {self._words()}"
        if before is not None and not diverged and self._has_recovered():
            self.since = None
            return f"step {step:,}: the loss, which diverged at step {before:,}, has recovered"
        return ""

    def summary(self) -> list[str]:
        """Returns a warning if the loss has diverged and not recovered."""
        if self.since is None:
            return []
        step, loss = self._lowest
        return [
            f"Warning: the loss has diverged since step {self.since:,}: {self._words()} "
            f"The lowest loss was {loss:.4g} in step {step:,}."
        ]

    @property
    def _start(self) -> float:
        """The loss of an untrained model."""
        _, first = self._first or (0, 0.0)
        return first if self._guessing is None else max(first, self._guessing)

    def _is_diverged(self) -> bool:
        start = self._start
        if len(self._losses) >= _SHORT:
            bound = start + (_FAR_ABOVE_START - 1) * max(abs(start), start - self._lowest[1])
            if statistics.median(list(self._losses)[-_SHORT:]) > bound:
                return True
        if self._guessing is None or len(self._entropies) < LONG:
            return False
        return statistics.median(self._entropies) > _WORSE_THAN_GUESSING * start

    def _has_recovered(self) -> bool:
        return len(self._losses) == LONG and statistics.median(self._losses) <= self._start

    def _words(self) -> str:
        (step, row), (first_step, first) = self._last, self._first or (0, 0.0)
        words = f"{row['loss']:.4g} in step {step:,}, {first:.4g} in step {first_step:,}"
        if self._guessing is not None:
            words += f", {self._guessing:.4g} by guessing"
        return f"{words}. {advice(self._params, row)}"


def of_run(
    path: pathlib.Path, params: Params, step: int, guessing_loss: float | None = None
) -> Divergence:
    """Returns what the metrics of a finished run tell.

    Args:
      path: the file of metrics, which may be missing or damaged.
      params: the trainer's Params.
      step: the last step of the run.
      guessing_loss: as in `Divergence`.
    """
    found = Divergence(params, guessing_loss)
    found.resume(first_and_last(path, step, LONG))
    if found.since is not None:
        # Only all rows tell since when.
        found = Divergence(params, guessing_loss)
        found.resume(rows_until(path, step))
    return found


def advice(params: Params, row: MetricsRow) -> str:
    """Returns sentences on what is likely to help a run whose loss diverges or is not finite.

    Args:
      params: the trainer's Params.
      row: metrics of the step.
    """
    p, rate = params, row["learning_rate"]
    usual = _USUAL_RATE_OF_GRADIENTS if p.optimizer.cls is Momentum else _USUAL_RATE
    if rate > usual:
        begin = (
            f"The likely cause is the learning rate: {rate:.4g} in this step, where {usual:g} "
            "would be high. Lower step.schedule.learning_rate"
        )
    else:
        begin = f"Likely to help: a lower step.schedule.learning_rate ({rate:.4g} in this step)"
    others = []
    if "warmup_steps" in p.schedule and not p.schedule.warmup_steps:
        others.append("step.schedule.warmup_steps (0: there is no warm-up)")
    if not p.clip_norm:
        others.append("step.clip_norm = 1.0 (0: gradients are not clipped)")
    if p.precision != "float32":
        others.append(f"step.precision = 'float32' (it is {p.precision})")
    words = f"{begin}; also consider {', '.join(others)}." if others else f"{begin}."
    dead = sum(count for name, count in row.items() if name.endswith(f"/{DEAD}"))
    return f"{words} Experts without tokens: {dead:.0f}." if dead else words


class NonFiniteError(TrainingFailedError):
    """The loss or the gradient of a training step is not finite."""

    @classmethod
    def at(
        cls, step: int, row: MetricsRow, where: str, checkpoints: Sequence[int], params: Params
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

    Repeats the step eagerly. Names the first layer, in forward order, whose output is not finite,
    or the weights whose gradients are not finite. Also names the operation and line that first made
    a NaN or infinity of finite values.

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
