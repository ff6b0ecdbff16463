"""The log directory of a run: its paths, and the check that it belongs to the run."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import time

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.training import processes
from lingvo_gshard.training.params_text import experiment_from_text

# Params that may change when a run resumes. They set the run's length, its output, its sharding and
# its types, but not what it computes.
FREE_PATHS = frozenset(
    (
        "trainer.steps",
        "trainer.log_every_steps",
        "trainer.checkpoint_every_steps",
        "trainer.keep_checkpoints",
        "trainer.evaluate_every_steps",
        "trainer.precision",
        "trainer.loss_scale.initial",
        "trainer.loss_scale.growth_interval",
        "trainer.loss_scale.growth_factor",
        "trainer.loss_scale.backoff_factor",
        "trainer.loss_scale.minimum",
        "trainer.average_decay",
        "task.fprop_dtype",
        "sharding.mesh",
        "sharding.strategy",
        "sharding.overrides",
    )
)


class Logdir:
    """The directory of one run.

    Attributes:
      path: the directory, absolute.
      params: the file params.txt, with every hyperparameter.
      checkpoints: the directory of the checkpoints.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path).absolute()
        self.params = self.path / "params.txt"
        self.checkpoints = self.path / "checkpoints"

    def has_checkpoints(self) -> bool:
        """Returns whether the directory has a complete checkpoint."""
        return self.last_step is not None

    @property
    def last_step(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        if not self.checkpoints.is_dir():
            return None
        steps = [int(child.name) for child in self.checkpoints.iterdir() if child.name.isdigit()]
        return max(steps, default=None)

    def read_params(self) -> Params:
        """Returns the Params of the run. Raises ValueError if the directory holds no run."""
        try:
            text = self.params.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no run: it has no params.txt") from None
        try:
            return experiment_from_text(text)
        except ValueError as error:
            raise ValueError(f"{self.params}: {error}") from None

    def claim(self, params: Params) -> None:
        """Creates the directory and writes params.txt, in the main process.

        Raises:
          ValueError: in all processes, if the directory cannot be written, if processes do not see
            the same directory, or if it belongs to another run (`check`).
        """
        self.check(params)
        problem = self._write(params.to_text()) if processes.is_main() else None
        problem = processes.from_main(problem) or self._not_shared()
        if problem:
            raise ValueError(f"--logdir {self.path} {problem}")

    def check(self, params: Params) -> None:
        """Raises ValueError naming the Params that differ from those of the run saved here.

        FREE_PATHS may differ.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"--logdir {self.path} is a file; a directory was expected")
        if not self.has_checkpoints():
            return
        saved = self.read_params()
        different = [row for row in saved.diff(params) if row[0] not in FREE_PATHS]
        if different:
            shown = [f"  {path}: {old} there, {new} here" for path, old, new in different[:10]]
            if len(different) > 10:
                shown.append(f"  and {len(different) - 10} more")
            raise ValueError(
                f"--logdir {self.path} holds a run of {saved.name or 'another experiment'} with "
                "other Params. Choose another directory, or the same Params:\n" + "\n".join(shown)
            )

    def _write(self, text: str) -> str | None:
        """Writes params.txt. Returns the problem if that is impossible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            unfinished = self.params.with_suffix(".txt.new")
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, self.params)
        except OSError as error:
            return f"cannot be written: {error.strerror}"
        return None

    def _not_shared(self) -> str | None:
        """Returns the problem if a process does not see the main process's directory."""
        if processes.count() == 1:
            return None
        token = self.path / f".shared-{processes.from_main(secrets.token_hex(8))}"
        if processes.is_main():
            token.touch()
        blind = [k for k, sees in enumerate(processes.gather(_appears(token))) if not sees]
        if processes.is_main():
            with contextlib.suppress(OSError):
                token.unlink()
        if not blind:
            return None
        return (
            f"of process {blind[0]} is another directory than that of process 0. All processes "
            "must share one"
        )


def _appears(path: pathlib.Path, seconds: float = 20.0) -> bool:
    """Waits for a file, which a network file system may show late. Returns whether it exists."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
