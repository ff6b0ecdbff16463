"""The training loop: feeds a runtime, writes metrics and checkpoints, and ends in good order."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import rich.console

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.input import Batch, Input
from lingvo_gshard.tasks.evaluation import WeightedMeans, perplexity
from lingvo_gshard.training import processes
from lingvo_gshard.training.checkpoint.store import IN_WORDS, Checkpoint, CheckpointStore, unflatten
from lingvo_gshard.training.logdir import Logdir
from lingvo_gshard.training.monitoring.diagnosis import NonFiniteError, diagnose
from lingvo_gshard.training.monitoring.expert_balance import ExpertBalance
from lingvo_gshard.training.monitoring.metrics import MetricsWriter, NoWriter, Row
from lingvo_gshard.training.monitoring.progress import Progress
from lingvo_gshard.training.runtime_protocol import Metrics, Runtime
from lingvo_gshard.training.signals import StopRequest
from lingvo_gshard.training.trainer import Trainer


@dataclasses.dataclass
class Outcome:
    """How training ended.

    Attributes:
      step: number of steps taken in all.
      finished: whether these are all steps of the experiment.
      signal: the signal that stopped training, such as "Ctrl-C"; None without one.
      metrics: metrics of the last step taken by this call; empty if it took none.
    """

    step: int
    finished: bool
    signal: str | None
    metrics: Row = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Pending:
    """A step whose metrics have not been read; its batch is kept for a diagnosis."""

    step: int
    metrics: Metrics
    batch: Batch


class Loop:
    """Trains to `trainer.steps` in a logdir that has been claimed for these Params.

    Metrics are read one step late, so that the device need not wait for the host. Where several
    processes train together, each has a loop; all stop at the same step, and the main one shows
    and writes.
    """

    def __init__(
        self,
        params: Params,
        trainer: Trainer,
        runtime: Runtime,
        input_: Input,
        logdir: Logdir,
        store: CheckpointStore,
        stop: StopRequest,
        console: rich.console.Console,
    ):
        self._params = params
        self._trainer = trainer
        self._runtime = runtime
        self._input = input_
        self._logdir = logdir
        self._store = store
        self._stop = stop
        self._console = console if processes.is_main() else rich.console.Console(quiet=True)
        self._pending: _Pending | None = None
        self._balance = ExpertBalance()
        self._last_row: Row = {}
        self.step = 0

    def run(self, checkpoint: Checkpoint | None = None) -> Outcome:
        """Trains from a checkpoint, or else from the start; returns how it ended.

        The dev split is read before the first step: what is wrong with it costs no training.
        Raises NonFiniteError, naming the step and the layer, if a loss or gradient is not finite,
        and OSError if the last checkpoint cannot be saved. Checkpoints saved before stay.
        """
        p = self._trainer.p
        self.step = checkpoint.step if checkpoint else 0
        if self.step >= p.steps:
            return Outcome(self.step, True, None)
        with contextlib.ExitStack() as stack:
            if "dev" in self._input.splits:
                self._input.check_split("dev")
            self._batches = self._input.train_batches(p.seed)
            stack.callback(self._batches.close)
            self._begin(checkpoint)
            self._progress = stack.enter_context(
                Progress(self._console, self.step, p.steps, p.log_every_steps, self._balance.digest)
            )
            self._writer = self._open_writer()
            stack.callback(self._writer.close)
            self._store.say = self._progress.say
            self._stop.finishing = True
            self._train()
            self._say_all(self._balance.summary())
            self._finish_saving()
        return Outcome(self.step, self.step >= p.steps, self._stop.agreed, self._last_row)

    def _open_writer(self) -> MetricsWriter | NoWriter:
        if not processes.is_main():
            return NoWriter()
        return MetricsWriter(self._logdir.path, self.step, self._progress.say)

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        """Brings weights and input to where the checkpoint left them, or to the start."""
        if checkpoint is None:
            self._runtime.init_state()
        else:
            like = self._runtime.abstract_state()
            self._runtime.load_state(restored_state(self._trainer, checkpoint, like))
            self._batches.set_state(checkpoint.position)
            # The runtime has its own copy now; a second one may not fit beside it.
            checkpoint.arrays.clear()

    def _train(self) -> None:
        p = self._trainer.p
        saved = self.step
        while self.step < p.steps and not self._stop.agreed:
            batch = next(self._batches)
            self._take_step(batch)
            if self._due(p.evaluate_every_steps) or self.step == p.steps:
                self._record(evaluate=True)
            if self._due(p.checkpoint_every_steps) and self.step < p.steps:
                self._record()
                self._save()
                saved = self.step
        self._record()
        if self.step > saved:
            self._save()

    def _take_step(self, batch: Batch) -> None:
        """Starts a step, and then looks at the metrics of the one before."""
        # Before the step, since what is announced is known when all that came before is done.
        self._stop.announce()
        compiled = self._runtime.compile_seconds
        metrics = self._runtime.train_step(batch)
        self._record()
        self.step += 1
        self._pending = _Pending(self.step, metrics, batch)
        seconds = self._runtime.compile_seconds - compiled
        if seconds:
            self._progress.say(f"step {self.step:,}  compiled in {seconds:.1f} s")
        for note in self._runtime.pop_messages():
            self._progress.say(note)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _record(self, evaluate: bool = False) -> None:
        """Reads, checks, shows and writes the metrics of the step before, if not yet done."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        row = pending.metrics.read()
        if self._trainer.stops(row):
            raise self._not_finite(pending, row)
        if "cross_entropy" in row:
            row["perplexity"] = perplexity(row["cross_entropy"])
        self._progress.count(row.get("tokens", 0.0))
        if self._progress.tokens_per_second:
            row["tokens_per_second"] = self._progress.tokens_per_second
        self._balance.add(pending.step, row)
        self._progress.update(pending.step, row)
        if self._is_logged(pending.step):
            self._say_all(self._balance.end_interval())
        if evaluate:
            row.update(self._evaluate(pending.step))
        self._writer.write(pending.step, row)
        self._last_row = row
        if evaluate or self._is_logged(pending.step):
            self._writer.curves(pending.step, row)
            self._store.poll()

    def _is_logged(self, step: int) -> bool:
        return step % self._trainer.p.log_every_steps == 0 or step == self._trainer.p.steps

    def _say_all(self, lines: list[str]) -> None:
        for line in lines:
            self._progress.say(line)

    def _evaluate(self, step: int) -> Row:
        """Returns the metrics of the dev split; nothing without one, or if asked to stop."""
        means = WeightedMeans()
        if "dev" not in self._input.splits:
            return {}
        for batch in self._input.evaluation_batches("dev"):
            self._stop.announce()
            if self._stop.agreed:
                return {}
            means.add(self._runtime.eval_step(batch))
        self._progress.pause()
        row = {f"dev/{name}": value for name, value in means.means().items()}
        if "dev/cross_entropy" in row:
            row["dev/perplexity"] = perplexity(row["dev/cross_entropy"])
        if row:
            shown = ("loss", "perplexity", "accuracy")
            parts = [f"{name} {row[f'dev/{name}']:.4f}" for name in shown if f"dev/{name}" in row]
            self._progress.say(f"step {step:,}  dev: {'  '.join(parts)}")
        return row

    def _save(self) -> None:
        self._store.save(
            self.step,
            self._runtime.state(),
            self._batches.get_state(),
            self._params.to_text(),
            self._input.save_vocabularies,
        )

    def _finish_saving(self) -> None:
        if not self._store.finish() or max(self._store.steps, default=0) != self.step:
            raise OSError(
                f"step {self.step:,} could not be saved; the run can go on from step "
                f"{max(self._store.steps, default=0):,} when there is room"
            )

    def _not_finite(self, pending: _Pending, row: Row) -> NonFiniteError:
        where = diagnose(self._trainer, self._runtime.theta_on_host(), pending.batch, pending.step)
        self._store.finish()
        good = self._store.steps
        kept = f"the last good checkpoint is step {good[-1]:,}" if good else "none was saved yet"
        return NonFiniteError(
            f"step {pending.step:,}: loss {row['loss']}, gradient norm {row['gradient_norm']}: "
            f"{where}; {kept}"
        )


def restored_state(
    trainer: Trainer, checkpoint: Checkpoint, like: NestedMap | None = None
) -> NestedMap:
    """Returns a checkpoint as a trainer's state; ValueError naming the arrays that do not fit.

    What it holds nothing of, since the trainer kept no averages or scaled no loss then, begins; so
    do moments after local updates, where each worker has its own. like: the state's arrays as a
    runtime has them, which may keep parts beside a trainer's.
    """
    specs = NestedMap({**(like or {}), **trainer.state_specs()})
    read = {
        part: unflatten(specs[part], arrays, IN_WORDS.get(part, part))
        for part, arrays in checkpoint.arrays.items()
        if part in specs
    }
    state = trainer.beside_weights(read["theta"])
    if "moments" not in read:
        state.moments = specs.moments.transform(lambda spec: np.zeros(spec.shape, spec.dtype))
    state.update(read, step=np.int32(checkpoint.step), stopped=np.bool_(False))
    return state
