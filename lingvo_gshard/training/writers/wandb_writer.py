"""Sends the rows of a run to Weights & Biases (https://docs.wandb.ai)."""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

from lingvo_gshard.training.monitoring.metrics import Row
from lingvo_gshard.training.writers.row_writer import PROJECT

# A run must not wait for a person to log in.
_LOGIN_SECONDS = 30


class WandbWriter:
    """Logs rows to one run of Weights & Biases, which sends them from a process of its own.

    The service's own settings hold, such as WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE=offline.

    Attributes:
      run_id: the service's id of the run.
      place: the address of the run, or the directory of its files.
    """

    def __init__(self, logdir: pathlib.Path, params: dict[str, str], known: str | None):
        """Starts a run, or goes on with a known one.

        Args:
          logdir: the run's directory, which gets the service's files as well.
          params: path -> value of the hyperparameters.
          known: the id of the run that goes on; None for a new one.
        """
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", logdir.name),
            dir=str(logdir),
            id=known,
            resume="allow",
            config=params,
            # What the run prints stays as it is.
            settings=wandb.Settings(console="off", silent=True, login_timeout=_LOGIN_SECONDS),
        )
        self.run_id: str = self._run.id
        files = pathlib.Path(self._run.dir).parent
        is_offline = self._run.offline
        self.place: str = f"{files}, for `wandb sync`" if is_offline else self._run.url

    def write(self, step: int, row: Row) -> None:
        """Sends the row of a step. The service ignores steps that it has already."""
        self._run.log(row, step=step)

    def flush(self) -> None:
        """Does nothing: rows leave at once."""

    def close(self, is_finished: bool) -> None:
        """Waits until all rows are sent."""
        self._run.finish(exit_code=0 if is_finished else 1)
