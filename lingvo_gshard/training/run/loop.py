"""The training loop: feeds batches to a runtime, and evaluates and saves when it is time."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import resource
from collections.abc import Callable, Iterable, Sequence

import rich.console

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.progress import SILENT, Progress
from lingvo_gshard.data.input import Batch, Input
from lingvo_gshard.tasks.evaluation import WeightedMeans, perplexity
from lingvo_gshard.training.run import processes
from lingvo_gshard.training.run.checkpoint.choice import KeepBest
from lingvo_gshard.training.run.checkpoint.run_item import Checkpoint
from lingvo_gshard.training.run.checkpoint.snapshots import SnapshotStore
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore
from lingvo_gshard.training.run.checkpoint.trainer_state import restored_state
from lingvo_gshard.training.run.determinism import batch_digest
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.run.monitoring.compilations import CompilationWatch
from lingvo_gshard.training.run.monitoring.divergence import NonFiniteError, diagnose
from lingvo_gshard.training.run.monitoring.metrics import (
    BATCH_DIGEST,
    DEVICE_MEMORY,
    HOST_MEMORY,
    MetricsRow,
)
from lingvo_gshard.training.run.monitoring.run_log import RunLog
from lingvo_gshard.training.run.monitoring.saving_time import SavingTime
from lingvo_gshard.training.run.monitoring.step_observer import StepObserver, StepObservers
from lingvo_gshard.training.run.options import DEV
from lingvo_gshard.training.run.roll_back import (
    BatchesWithoutSkipped,
    PersistentSpikeError,
    RollBack,
    RollBacks,
    count_roll_backs,
)
from lingvo_gshard.training.run.run_lock import MovedError
from lingvo_gshard.training.run.runtime_protocol import Metrics, Runtime
from lingvo_gshard.training.run.signals import StopRequest
from lingvo_gshard.training.step import update_ratios
from lingvo_gshard.training.step.trainer import Trainer

_STATUS = pathlib.Path("/proc/self/statm")


def memory_metrics(runtime: Runtime) -> MetricsRow:
    """Returns the memory of this process, and of the fullest of its devices.

    Returns:
      host_memory_bytes: memory of the process that is in RAM now.
      peak_device_memory_bytes: the most that was ever in use on a device; missing for CPUs.
    """
    row = {HOST_MEMORY: float(resident_bytes())}
    peak = runtime.peak_device_memory()
    return row if peak is None else {**row, DEVICE_MEMORY: float(peak)}


def resident_bytes() -> int:
    """Returns the memory of this process that is in RAM now."""
    # The second number is the resident set, in pages.
    return int(_STATUS.read_bytes().split()[1]) * resource.getpagesize()


def snapshot_run(logdir: Logdir) -> str:
    """Returns the text that a snapshot has in common with the run, in all processes.

    It differs after the directory was deleted, and after the run went back to a checkpoint.
    """
    return processes.from_main(f"{logdir.number} {count_roll_backs(logdir.path)}")


@dataclasses.dataclass
class Outcome:
    """The end of a run.

    Attributes:
      step: number of steps taken, including steps before the run resumed.
      finished: whether the run has taken all its steps.
      signal: why the run ended early, one of `EXIT_CODES`, such as "Ctrl-C"; None if it did not.
      metrics: metrics of the last step that this call took; empty if it took none.
      diverged_since: the step that showed the divergence of the loss (`Divergence.since`); None if
        the loss has not diverged, or has recovered.
    """

    step: int
    finished: bool
    signal: str | None
    metrics: MetricsRow = dataclasses.field(default_factory=dict)
    diverged_since: int | None = None


@dataclasses.dataclass
class _Pending:
    """A step whose metrics have not been read.

    Attributes:
      step: number of the step, from 1.
      metrics: the step's metrics, which may still be computed.
      batch: the step's batch, for a diagnosis.
      digest: the batch's digest.
    """

    step: int
    metrics: Metrics
    batch: Batch
    digest: int


class TrainingLoop:
    """Trains to `run.steps` in a log directory that was claimed for the run's Params.

    The loop reads a step's metrics after it has started the next step, so that the device does not
    wait for the host. In a cluster each process has a loop; all stop at the same step.

    Attributes:
      step: number of steps started.
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
        observers: Sequence[StepObserver] = (),
        snapshots: SnapshotStore | None = None,
    ):
        """Makes the loop of one run.

        Args:
          params: the experiment's Params, which every checkpoint records.
          trainer: the experiment's trainer.
          runtime: holds the state and runs the steps.
          input_: the batches.
          logdir: where metrics are written.
          store: where checkpoints are written.
          stop: tells when to stop early.
          console: where progress is shown.
          observers: are told of each step.
          snapshots: where snapshots in memory are kept; None takes none.
        """
        self._params = params
        self._trainer = trainer
        self._runtime = runtime
        self._input = input_
        self._logdir = logdir
        self._store = store
        self._stop = stop
        self._console = console
        self._given_observers = observers
        self._snapshots = snapshots if snapshots and snapshots.is_open else None
        self._pending: _Pending | None = None
        self._saved_step = 0
        self._is_first = True
        self._is_evaluated = False
        self._keep_best = KeepBest(params.run)
        self._saving_time = SavingTime()
        self._last_row: MetricsRow = {}
        self.step = 0

    def run(self, checkpoint: Checkpoint | None = None, progress: Progress = SILENT) -> Outcome:
        """Trains from a checkpoint, or from the initial weights if there is none.

        Checks the dev split before the first step, so that errors in it cost no training.

        Args:
          checkpoint: the checkpoint to resume from.
          progress: is told the stages before the first step; closed there.

        Raises:
          UserError: the dev split cannot be read, or has no examples.
          NonFiniteError: a loss or gradient is not finite. Names the step and the layer.
          RollBackLimitError: spikes came back after as many roll backs as are allowed.
          OSError: the last checkpoint could not be saved. Older checkpoints remain.
        """
        p = self._trainer.p
        self.step = checkpoint.step if checkpoint else 0
        # A snapshot in memory may be newer than the newest checkpoint.
        self._saved_step = min(self.step, max(self._store.steps, default=0))
        with contextlib.ExitStack() as stack:
            self._check_dev()
            self._roll_backs = RollBacks(p.spikes, self._logdir.path, self.step)
            self._batches = BatchesWithoutSkipped(
                self._input.train_batches(p.seed), self._roll_backs.skipped
            )
            stack.callback(self._batches.close)
            progress.begin("Initializing the weights" if checkpoint is None else "Loading")
            self._load(checkpoint)
            progress.close()
            guessing_loss = self._trainer.task.guessing_loss()
            watch = CompilationWatch(lambda: self._input.declared_batches(self._input.p))
            log = RunLog(self._console, self._logdir, self._params, self.step, guessing_loss, watch)
            self._log = stack.enter_context(log)
            self._store.say = self._log.say
            self._watch_routers()
            self._check_keep_best()
            self._evaluate_if_missed()
            stack.callback(lambda: self._observers.at_end())
            self._train()
            lines = [*self._keep_best.words(), *self._roll_backs.summary()]
            self._log.show_summary([*lines, *self._saving_time.words()])
            self._finish_saving()
        return Outcome(
            self.step,
            self.step >= self._params.run.steps or self._keep_best.ends_training,
            self._stop.agreed,
            self._last_row,
            self._log.diverged_since,
        )

    def _watch_routers(self) -> None:
        """Begins to watch the routers in the steps after `step`, if they are to be watched."""
        observers = list(self._given_observers)
        if self._params.run.routers.every_steps:
            # Runs whose routers are not watched do not wait for what records and draws them.
            from lingvo_gshard.training.run.routers.watch import RouterWatch

            observers.append(
                RouterWatch(
                    self._trainer,
                    self._params.run.routers,
                    self._runtime,
                    self._input,
                    self._logdir,
                    self.step,
                    self._log,
                )
            )
        self._observers = StepObservers(observers)

    def _check_dev(self) -> None:
        """Reads and tokenizes the dev split, if there is one."""
        self._keep_best.check_splits(self._input.splits)
        # No row may be held out of the training files, which is known when these are read.
        self._input.check_split("train")
        if "dev" not in self._input.splits:
            return
        self._input.check_split("dev")
        batches = iter(self._input.evaluation_batches("dev"))
        if next(batches, None) is None:
            raise UserError("the dev split has no examples: none of its rows fits a batch")

    def _load(self, checkpoint: Checkpoint | None) -> None:
        """Restores the state and the input's position, or initializes them."""
        self._keep_best.load(checkpoint)
        if checkpoint is None:
            self._runtime.init_state()
            return
        abstract_state = self._runtime.abstract_state()
        self._runtime.load_state(restored_state(self._trainer, checkpoint, abstract_state))
        if checkpoint.position is not None:
            # A model that was imported begins with the first batch.
            self._batches.move(checkpoint.step, checkpoint.position, self._roll_backs.skipped)
        # The runtime has its own copy. Two may not fit into memory.
        checkpoint.arrays.clear()

    def _check_keep_best(self) -> None:
        """Raises ValueError if no metric of the dev split is called `keep_best`."""
        if self._params.run.keep_best:
            batch = next(iter(self._input.evaluation_batches("dev")))
            self._keep_best.check_metrics(self._dev_row([batch]))

    def _evaluate_if_missed(self) -> None:
        """Evaluates the step that the run resumes from if a signal cut its evaluation short."""
        if not self.step or not self._is_due(self._params.run.evaluate_every_steps):
            return
        if "dev" in self._input.splits and processes.from_main(
            self._log.lacks_evaluation(self.step)
        ):
            row = self._evaluate(self.step)
            self._log.add_evaluation(self.step, row)
            self._keep_best.add(self.step, row)

    def _train(self) -> None:
        """Takes all steps, including steps after a roll back."""
        while True:
            try:
                return self._take_steps()
            except PersistentSpikeError as error:
                self._roll_back(error.roll_back)

    def _take_steps(self) -> None:
        p = self._params.run
        while self._goes_on:
            self._take_step(self._next_batch())
            is_best = False
            if self._is_due(p.evaluate_every_steps) or self.step == p.steps:
                self._finish_step(evaluate=True)
                is_best = self._keep_best.add(self.step, self._last_row)
            is_due = is_best or self._is_due(p.checkpoint_every_steps)
            if is_due and self.step < p.steps:
                self._finish_step()
                self._save()
            if self._is_due(p.snapshot_every_steps) and self.step < p.steps:
                self._take_snapshot()
        self._finish_step()
        if self.step > self._saved_step:
            self._save()

    @property
    def _goes_on(self) -> bool:
        """Whether there is another step to take."""
        is_last = self.step >= self._params.run.steps or self._keep_best.ends_training
        return not is_last and not self._stop.agreed

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _next_batch(self) -> Batch:
        """Waits for the next step's batch."""
        step = self.step + 1
        if self._observers.needs_idle(step):
            # The observers' work from here is no part of the run's speed.
            self._log.pause()
            self._finish_step()
            self._observers.before_other_work("waits for its observers")
            self._observers.while_idle(step)
        self._observers.before_input(step)
        batch = next(self._batches)
        self._observers.before_step(step, batch)
        return batch

    def _take_step(self, batch: Batch) -> None:
        """Starts a step and then finishes the one before."""
        # Announced first: the answer is known as soon as all work started earlier is done.
        self._stop.announce()
        with self._log.compiling() if self._is_first else contextlib.nullcontext():
            metrics = self._runtime.train_step(batch)
        self._is_first = False
        # While the devices are busy.
        digest = batch_digest(batch)
        # Before the first step is compiled and started, there is nothing to save.
        self._stop.finishing = True
        self._finish_step()
        self.step += 1
        self._pending = _Pending(self.step, metrics, batch, digest)
        self._add_compilations(self.step)
        for message in self._runtime.pop_messages():
            self._log.say(message)

    def _finish_step(self, evaluate: bool = False) -> None:
        """Waits for the pending step, if there is one, and logs its metrics."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        self._observers.before_result(pending.step)
        every = self._trainer.p.update_ratios_every
        row = update_ratios.only_if_due(pending.step, pending.metrics.read(), every)
        self._check_directory(self._logdir.check_lock_here)
        self._observers.after_step(pending.step, row)
        if self._trainer.should_stop(row):
            theta = self._runtime.theta_on_host()
            where = diagnose(self._trainer, theta, pending.batch, pending.step)
            self._store.finish()
            raise NonFiniteError.at(pending.step, row, where, self._store.steps, self._trainer.p)
        self._check_spikes(pending.step, row)
        row.update(memory_metrics(self._runtime), **{BATCH_DIGEST: float(pending.digest)})
        self._log.add_step(pending.step, row)
        if evaluate:
            row.update(self._evaluate(pending.step))
        is_point = evaluate or self._log.is_logged(pending.step)
        self._log.write(pending.step, row, is_point)
        self._last_row = row
        if is_point:
            self._store.poll()

    def _check_spikes(self, step: int, row: MetricsRow) -> None:
        """Raises PersistentSpikeError if a step asks for a roll back, and there is where to go."""
        if not self._roll_backs.is_due(row):
            return
        self._store.finish()
        roll_back = self._roll_backs.plan(step, row, self._store.steps)
        if roll_back is not None:
            raise PersistentSpikeError(roll_back)
        self._log.say(
            f"Warning: step {step:,}: no checkpoint is older than the spikes, so there is nothing "
            "to go back to"
        )

    def _roll_back(self, roll_back: RollBack) -> None:
        """Restores the state before the spikes. The step in progress is dropped."""
        self._observers.before_other_work("rolls back")
        self._log.say(roll_back.words())
        self._pending = None
        self._logdir.check_lock()
        self._store.delete_after(roll_back.last_step)
        self._roll_backs.add(roll_back)
        if self._snapshots:
            self._snapshots.begin_again(snapshot_run(self._logdir))
        self._logdir.push()
        checkpoint = self._store.restore(self._runtime.abstract_state())
        assert checkpoint is not None
        self._load(checkpoint)
        self.step = self._saved_step = checkpoint.step
        self._log.roll_back(self.step)
        self._watch_routers()

    def _evaluate(self, step: int) -> MetricsRow:
        """Returns the metrics of the dev split; none if there is no such split or on a stop."""
        if "dev" not in self._input.splits:
            return {}
        self._observers.before_other_work("evaluates")
        row = self._dev_row(self._input.evaluation_batches("dev"))
        if not row:
            return {}
        self._log.pause()
        self._add_compilations(step)
        self._log.show_dev(step, row)
        return row

    def _dev_row(self, batches: Iterable[Batch]) -> MetricsRow:
        """Returns the metrics of batches of the dev split; none on a stop."""
        means = WeightedMeans()
        for number, batch in enumerate(batches, 1):
            self._stop.announce()
            if self._stop.agreed:
                return {}
            what = f"evaluating, batch {number:,}"
            with self._log.working(what if self._is_evaluated else "compiling the evaluation"):
                means.add(self._runtime.eval_step(batch))
            self._is_evaluated = True
        row = {f"{DEV}{name}": value for name, value in means.means().items()}
        if "dev/cross_entropy" in row:
            row["dev/perplexity"] = perplexity(row["dev/cross_entropy"])
        return row

    def _save(self) -> None:
        self._observers.before_other_work("saves a checkpoint", self._params.run.save_seconds)
        self._check_directory(self._logdir.check_lock)
        # A checkpoint whose steps lack rows would leave a gap in the metrics of a resumed run.
        self._log.flush()
        with self._saving_time.measured("checkpoints"):
            self._store.save(
                self.step,
                self._runtime.state(),
                self._batches.get_state(),
                self._params.to_text(),
                self._input.save_vocabularies,
                self._keep_best.best,
            )
        self._saved_step = self.step

    def _take_snapshot(self) -> None:
        """Copies the state to the memory of the hosts, if an agent keeps it there."""
        if self._snapshots is None:
            return
        self._finish_step()
        self._observers.before_other_work("takes a snapshot", self._params.run.save_seconds)
        # A snapshot whose steps lack rows would leave a gap in the metrics.
        self._log.flush()
        position, text = self._batches.get_state(), self._params.to_text()
        state, best = self._runtime.state(), self._keep_best.best
        with self._saving_time.measured("snapshots"):
            self._snapshots.save(self.step, state, position, text, best)
        if problem := self._snapshots.pop_problem():
            self._log.say(f"Warning: a snapshot could not be written ({problem})")

    def _add_compilations(self, step: int) -> None:
        """Logs what was compiled since the last call, which may have taken minutes."""
        self._check_directory(self._logdir.check_lock_here)
        self._log.add_compilations(step, self._runtime.compilations)

    def _check_directory(self, check: Callable[[], None]) -> None:
        """Calls a check of the log directory; adds to an error which steps are lost.

        Every write to the directory is preceded by this check. A save in the background creates
        missing folders. If the directory was moved away, later files would otherwise go to a second
        directory.
        """
        try:
            check()
        except MovedError as error:
            raise MovedError(
                f"{error}; steps {self._saved_step + 1:,} to {self.step:,} are lost. If it was "
                f"moved, the same command with its new `logdir` resumes from step "
                f"{self._saved_step:,}"
            ) from None

    def _finish_saving(self) -> None:
        is_saved = self._store.finish()
        newest = max(self._store.steps, default=0)
        if not is_saved or newest != self.step:
            raise OSError(
                f"step {self.step:,} could not be saved. {self._store.advice}; the same command "
                f"then resumes from step {newest:,}"
            )
