"""A trained model as gshard-train left it: Params, input, vocabularies, task and weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from absl import flags

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.decoding import Translator
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.tools.flags.runtime import Launch
from lingvo_gshard.training.checkpoint.store import IN_WORDS, CheckpointStore, unflatten
from lingvo_gshard.training.experiments import with_vocabulary_sizes
from lingvo_gshard.training.logdir import Logdir
from lingvo_gshard.training.runtime_protocol import Runtime


def define_decoding_flags(values: flags.FlagValues) -> None:
    """Adds the flags that say how sentences are decoded."""
    flags.DEFINE_integer(
        "beam_size",
        4,
        "Hypotheses kept for each sentence; 1 is greedy decoding, about four times as fast.",
        1,
        flag_values=values,
    )
    flags.DEFINE_float(
        "length_exponent",
        1.0,
        "How much the beam search favours longer translations; 0 is not at all.",
        0.0,
        flag_values=values,
    )


def decoding_options(values: flags.FlagValues) -> dict[str, object]:
    """Returns the Translator's options that `define_decoding_flags` gave."""
    return {"beam_size": values.beam_size, "length_exponent": values.length_exponent}


@dataclasses.dataclass(frozen=True)
class Trained:
    """The newest readable checkpoint of a run, ready to use."""

    step: int
    task: Layer
    runtime: Runtime
    input: object

    def translator(self, **options: object) -> Translator:
        """Returns a Translator; the options are its own."""
        vocabularies = self.input.source_vocabulary, self.input.target_vocabulary
        return Translator(self.task, self.runtime, *vocabularies, **options)


class Run:
    """The run in a log directory; Params are read at once, weights when asked for."""

    def __init__(self, logdir: str | None, tasks: tuple[type[Layer], ...] = (TranslationTask,)):
        """Raises ValueError, saying what to do, if the directory holds no model of these tasks."""
        if not logdir:
            raise ValueError("--logdir is missing: the directory that gshard-train wrote")
        self._logdir = Logdir(logdir)
        advice = f"Train one first: gshard-train --experiment=NAME --logdir={logdir}"
        if not self._logdir.path.is_dir():
            raise ValueError(f"--logdir={logdir}: there is no such directory. {advice}")
        if not self._logdir.params.exists():
            raise ValueError(f"--logdir={logdir}: there is no run in it (no params.txt). {advice}")
        self.checkpoints = self._logdir.checkpoints
        self.params: Params = self._logdir.read_params()
        if not self._logdir.has_checkpoints():
            raise ValueError(
                f"--logdir={logdir}: the run of {self.params.name} has no checkpoint yet. One "
                "comes every trainer.checkpoint_every_steps steps, at the end, and on Ctrl-C"
            )
        if not issubclass(self.params.task.cls, tasks):
            expected = " or ".join(task.__name__ for task in tasks)
            raise ValueError(
                f"--logdir={logdir}: the run of {self.params.name} has the task "
                f"{self.params.task.cls.__name__}; {expected} was expected"
            )

    @functools.cached_property
    def input(self) -> object:
        """The run's input; nothing of its corpus has been read."""
        return self.params.input.instantiate()

    def restore(self, launch: Launch, say: Callable[[str], None]) -> Trained:
        """Returns the newest readable checkpoint, its weights on the runtime that was asked for.

        Damaged checkpoints are reported through `say`.
        """
        store = CheckpointStore(self._logdir.checkpoints, say=say, writable=False)
        try:
            newest = store.peek()
            if newest is None:
                raise ValueError(f"{self._logdir.checkpoints} holds no whole checkpoint")
            self.input.load_vocabularies(newest.extras)
            task = with_vocabulary_sizes(self.params.task, self.input)
            trainer = self.params.trainer.instantiate(task)
            runtime = launch.runtime(trainer)
            checkpoint = store.restore(runtime.abstract_state(), parts=(trainer.evaluated,))
        finally:
            store.close()
        part = trainer.evaluated
        specs, arrays = trainer.state_specs()[part], checkpoint.arrays.get(part, {})
        runtime.load_theta(unflatten(specs, arrays, IN_WORDS[part]))
        return Trained(checkpoint.step, trainer.task, runtime, self.input)
