"""The log directory: params.txt, metrics.jsonl, events/, checkpoints/; and whose it is."""

from __future__ import annotations

import os
import pathlib

from lingvo_gshard.core.params import Params
from lingvo_gshard.training.params_text import experiment_from_text

# These say how long a run goes and what it shows, not what it computes.
FREE_PATHS = frozenset(
    f"trainer.{name}"
    for name in (
        "steps",
        "log_every_steps",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "evaluate_every_steps",
    )
)


class Logdir:
    """The paths of one run's directory, and the check that it belongs to this run."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path).absolute()
        self.params = self.path / "params.txt"
        self.checkpoints = self.path / "checkpoints"

    def has_checkpoints(self) -> bool:
        """Whether any checkpoint has been completed here."""
        if not self.checkpoints.is_dir():
            return False
        return any(child.name.isdigit() for child in self.checkpoints.iterdir())

    def read_params(self) -> Params:
        """Returns the Params of the run; ValueError naming the directory if it holds none."""
        try:
            text = self.params.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no run: there is no params.txt") from None
        try:
            return experiment_from_text(text)
        except ValueError as error:
            raise ValueError(f"{self.params}: {error}") from None

    def claim(self, params: Params) -> None:
        """Makes the directory and writes params.txt.

        Raises ValueError if that cannot be done, or if a run of other Params is saved here, as in
        `check`.
        """
        self.check(params)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            unfinished = self.params.with_suffix(".txt.new")
            unfinished.write_text(params.to_text(), encoding="utf-8")
            os.replace(unfinished, self.params)
        except OSError as error:
            raise ValueError(f"--logdir {self.path} cannot be written: {error.strerror}") from None

    def check(self, params: Params) -> None:
        """Raises ValueError naming the paths that differ if a run of other Params is saved here.

        Params that only say how long a run goes and what it shows (FREE_PATHS) may differ.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--logdir {self.path} is a file; a directory was expected")
        if not self.has_checkpoints():
            return
        saved = self.read_params()
        different = [row for row in saved.diff(params) if row[0] not in FREE_PATHS]
        if different:
            shown = [f"  {path}: {was} there, {now} here" for path, was, now in different[:10]]
            if len(different) > 10:
                shown.append(f"  and {len(different) - 10} more")
            raise ValueError(
                f"--logdir {self.path} holds a run of {saved.name or 'another experiment'} with "
                "other Params; give another directory, or the same Params:\n" + "\n".join(shown)
            )
