"""Notices that a loss diverges or has spikes, and says where a step became non-finite."""

from __future__ import annotations

import collections
import math
import pathlib
import statistics
from collections.abc import Iterable, Sequence

from lingvo_gshard.core import NestedMap, Params, signals, tf
from lingvo_gshard.data import Batch, PackedBatch
from lingvo_gshard.training import (
    METRICS_FILE,
    Checkpoint,
    MetricsRow,
    ObservedRun,
    StepObserver,
    TensorBatch,
    Trainer,
)
from lingvo_gshard.wings.optimizers.momentum import Momentum
from lingvo_gshard.wings.services.expert_balance import DEAD
from lingvo_gshard.wings.services.metrics_rows import first_and_last, rows_until
from lingvo_gshard.wings.tracing.non_finite import INFINITY, NAN, Origins, watching_origins

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
        """Watches a run; `guessing_loss` is the cross-entropy of guessing evenly, if known."""
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
        is_low = len(self._losses) == LONG and statistics.median(self._losses) <= self._start
        if before is not None and not diverged and is_low:
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

    def _words(self) -> str:
        (step, row), (first_step, first) = self._last, self._first or (0, 0.0)
        words = f"{row['loss']:.4g} in step {step:,}, {first:.4g} in step {first_step:,}"
        if self._guessing is not None:
            words += f", {self._guessing:.4g} by guessing"
        return f"{words}. {advice(self._params, row)}"


# At most so many spikes are shown.
_MOST_LINES = 20


class LossWatch(StepObserver):
    """Warns of spikes and of a loss that diverges, and says where a step became non-finite."""

    def __init__(self, run: ObservedRun):
        self._run = run
        self._guessing_loss = run.trainer.task.guessing_loss()
        self._divergence = Divergence(run.params.step, self._guessing_loss)
        self._shown_spikes, self._spikes = 0, 0.0

    def go_on(self, checkpoint: Checkpoint | None) -> None:
        """Reads the losses of earlier steps."""
        run = self._run
        self._divergence = Divergence(run.params.step, self._guessing_loss)
        if run.step:
            earlier = first_and_last(run.logdir.path / METRICS_FILE, run.step, LONG)
            self._divergence.resume(earlier)
        run.diverged_since = self._divergence.since

    def after_step(self, step: int, row: MetricsRow) -> None:
        """Shows what a step tells."""
        self._spikes = row.get("spikes", 0.0)
        # A mean over workers is positive if the step of any of them is a spike.
        if row.get("spike"):
            self._tell_spike(step, row)
        warning = self._divergence.add(step, row)
        if warning:
            self._run.say(warning)
        self._run.diverged_since = self._divergence.since

    def _tell_spike(self, step: int, row: MetricsRow) -> None:
        self._shown_spikes += 1
        if self._shown_spikes > _MOST_LINES:
            return
        is_trained_on = self._run.params.step.spikes.policy == "warn"
        end = "it was trained on" if is_trained_on else "its update was discarded"
        self._run.say(
            f"Warning: step {step:,} is a spike, and {end}: loss {row['loss']:.4g} is "
            f"{row['loss_deviations']:.1f} deviations above its running mean, gradient norm "
            f"{row['gradient_norm']:.4g} is {row['gradient_norm_deviations']:.1f}"
        )

    def on_divergence(self, step: int, row: MetricsRow, batch: Batch) -> None:
        """Repeats the step to find the cause. Raises NonFiniteError, which names step and layer."""
        run = self._run
        where = diagnose(run.trainer, run.runtime.theta_on_host(), batch, step)
        run.store.finish()
        raise NonFiniteError.at(step, row, where, run.store.steps, run.trainer.p)

    def summary(self) -> list[str]:
        """Returns the number of spikes, if there were any, and a warning of a divergence."""
        spikes = f"spikes: {self._spikes:,.0f} since the first step of the run"
        counted = [f"{spikes} (metrics.jsonl has each)"] if self._spikes else []
        return [*counted, *self._divergence.summary()]


def of_run(
    path: pathlib.Path, params: Params, step: int, guessing_loss: float | None = None
) -> Divergence:
    """Returns what a file of metrics, which may be damaged, tells up to the last step."""
    found = Divergence(params, guessing_loss)
    found.resume(first_and_last(path, step, LONG))
    if found.since is not None:
        # Only all rows tell since when.
        found = Divergence(params, guessing_loss)
        found.resume(rows_until(path, step))
    return found


def advice(params: Params, row: MetricsRow) -> str:
    """Returns sentences on what is likely to help a run whose loss diverges or is not finite."""
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


class NonFiniteError(signals.TrainingFailedError):
    """The loss or the gradient of a training step is not finite."""

    @classmethod
    def at(
        cls, step: int, row: MetricsRow, where: str, checkpoints: Sequence[int], params: Params
    ) -> NonFiniteError:
        """Returns the error of a step; `where` is what `diagnose` says, `checkpoints` ascend."""
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
    """Says where a step became non-finite, in a clause for an error message.

    Repeats the step eagerly. Names the first layer, in forward order, whose output is not finite,
    or the weights whose gradients are not finite. Also names the operation and line that first made
    a NaN or infinity of finite values.

    Args:
      step: number of the step, from 1.
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
