"""Member: one run of a study, which trains and is scored in processes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.wings.services import run_records
from lingvo_gshard.wings.services.run_records import EvaluationRow, Launch


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a study.

    Attributes:
      folder: the directory of the study.
      model: name of the experiment.
      seed: seed of the run.
      settings: gin statements that change the experiment.
      gin_files: files of gin statements.
      steps: total number of steps; None: the experiment's.
      language: the only language of a bilingual model; empty for all languages.
      variant: name of what the settings change; empty if that is nothing.
      split: the split that is scored.
      score_options: options of gshard-evaluate, name -> value; a missing one has its default.
    """

    folder: pathlib.Path
    model: str
    seed: int
    settings: tuple[str, ...] = ()
    gin_files: tuple[str, ...] = ()
    steps: int | None = None
    language: str = ""
    variant: str = ""
    split: str = "test"
    score_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """The model's name in tables."""
        return self.model.rpartition(".")[2]

    @property
    def name(self) -> str:
        """Name of the run and of the run's directory."""
        model = self.model if self.variant else self.label
        parts = [model, self.variant, self.language, f"seed{self.seed}"]
        return "-".join(filter(None, parts))

    @property
    def logdir(self) -> pathlib.Path:
        """Directory of the run."""
        return self.folder / self.name

    @property
    def evaluation(self) -> EvaluationRow | None:
        """The newest scores of the split; None before the run is trained and scored."""
        if not self.logdir.exists():
            return None
        names = {*self.score_options, "max_rows_per_language"}
        found = [
            row
            for row in run_records.read_evaluations(self.logdir)
            if row.split == self.split
            and all(row.options.get(name) == self.score_options.get(name) for name in names)
        ]
        return found[-1] if found and self._is_trained else None

    @property
    def is_scored(self) -> bool:
        """Whether the run is trained and scored."""
        return self.evaluation is not None

    @property
    def launch(self) -> Launch:
        """The last start of the run."""
        return run_records.read_launches(self.logdir)[-1]

    def params(self) -> Params:
        """Returns the experiment with the study's settings; ValueError if one is wrong."""
        params = experiment(self.model, self._statements, self.gin_files)
        params.step.set(seed=self.seed)
        params.run.set(steps=self.steps or params.run.steps)
        return params

    def train(self) -> None:
        """Trains the run, from its newest checkpoint if there is one."""
        self._command(
            "train",
            f"--experiment={self.model}",
            f"--seed={self.seed}",
            *(f"--gin_file={path}" for path in self.gin_files),
            *(f"--gin_param={text}" for text in self._statements),
            *([f"--steps={self.steps}"] if self.steps else []),
        )

    def score(self) -> None:
        """Scores the split."""
        given = (f"--{name}={value}" for name, value in self.score_options.items())
        self._command("evaluate", f"--split={self.split}", *given)

    @property
    def _statements(self) -> tuple[str, ...]:
        """The gin statements that change the experiment: the settings, and the only language."""
        languages = (f"input.languages = ('{self.language}',)",) if self.language else ()
        return *self.settings, *languages

    @property
    def _is_trained(self) -> bool:
        """Whether a run that has scores is trained to its end, which may come early if bilingual.

        Fewer steps are done than wanted if --steps was raised since. A bilingual run is scored only
        when its training has ended by itself.
        """
        last = Logdir(self.logdir).last_step or 0
        return last >= self.params().run.steps or bool(self.language)

    def _command(self, name: str, *flags: str) -> None:
        """Runs a command of this package on the run; ends the study with its exit code if not 0."""
        command = [sys.executable, "-m", "lingvo_gshard", name, f"--logdir={self.logdir}", *flags]
        with subprocess.Popen(command) as process:
            code = _wait(process)
        if code:
            raise SystemExit(code if code > 0 else 128 - code)


def _wait(process: subprocess.Popen) -> int:
    """Waits for a process that gets the terminal's Ctrl-C, too, and then saves a checkpoint."""
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
