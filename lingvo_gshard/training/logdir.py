"""The log directory: params.txt, metrics.jsonl, events/, checkpoints/; and whose it is."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import time

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.training import processes
from lingvo_gshard.training.params_text import experiment_from_text

# These say how long a run goes, what it shows, what is split and of which types, not what is
# computed.
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
    """The paths of one run's directory, and the check that it belongs to this run."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path).absolute()
        self.params = self.path / "params.txt"
        self.checkpoints = self.path / "checkpoints"

    def has_checkpoints(self) -> bool:
        """Whether any checkpoint has been completed here."""
        return self.last_step is not None

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint completed here, None if there is none."""
        if not self.checkpoints.is_dir():
            return None
        steps = [int(child.name) for child in self.checkpoints.iterdir() if child.name.isdigit()]
        return max(steps, default=None)

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
        """Makes the directory and writes params.txt, in the main process.

        Raises ValueError, in all processes, if that cannot be done, if not all of them see the same
        directory, or if a run of other Params is saved here, as in `check`.
        """
        self.check(params)
        problem = self._write(params.to_text()) if processes.is_main() else None
        problem = processes.from_main(problem) or self._not_shared()
        if problem:
            raise ValueError(f"--logdir {self.path} {problem}")

    def check(self, params: Params) -> None:
        """Raises ValueError naming the paths that differ if a run of other Params is saved here.

        Params that say how long a run goes, what it shows, what is split and of which types
        (FREE_PATHS) may differ.
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

    def _write(self, text: str) -> str | None:
        """Writes params.txt; returns what is wrong if that cannot be done."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            unfinished = self.params.with_suffix(".txt.new")
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, self.params)
        except OSError as error:
            return f"cannot be written: {error.strerror}"
        return None

    def _not_shared(self) -> str | None:
        """Returns what is wrong if a process does not see what the main one writes here."""
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
            f"of process {blind[0]} is another directory than process 0's; a shared one is expected"
        )


def _appears(path: pathlib.Path, seconds: float = 20.0) -> bool:
    """Whether a file is there, or comes to be: network file systems take their time."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
