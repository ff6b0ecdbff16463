"""Sends the rows of a run to MLflow (https://mlflow.org)."""

from __future__ import annotations

import importlib
import math
import os
import pathlib
import re
import time
from typing import Any

from lingvo_gshard.training.monitoring.metrics import Row
from lingvo_gshard.training.writers.row_writer import PROJECT

# MLflow's limits of one request, and of the length of a value.
_MOST_METRICS, _MOST_PARAMS, _LONGEST = 1000, 100, 500


class MlflowWriter:
    """Logs rows to one run of MLflow, many in one request, from a thread of MLflow's.

    The service's own settings hold, such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.

    Attributes:
      run_id: the service's id of the run.
      place: the service and the id.
    """

    def __init__(self, logdir: pathlib.Path, params: dict[str, str], known: str | None):
        """Starts a run, or goes on with a known one.

        Args:
          logdir: the run's directory, whose name the run gets.
          params: path -> value of the hyperparameters.
          known: the id of the run that goes on; None for a new one.
        """
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        self._waiting: list[Any] = []
        self._sent: list[Any] = []
        self.run_id: str = known or self._new_run(logdir.name, params)
        if known:
            self._client.update_run(known, "RUNNING")
        self.place = f"run {self.run_id} at {mlflow.get_tracking_uri()}"

    def _new_run(self, name: str, params: dict[str, str]) -> str:
        """Starts a run with these hyperparameters and returns its id."""
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id = self._client.create_run(number, run_name=name).info.run_id
        values = [self._entities.Param(key_of(k), v[:_LONGEST]) for k, v in params.items() if v]
        for start in range(0, len(values), _MOST_PARAMS):
            self._client.log_batch(run_id, params=values[start : start + _MOST_PARAMS])
        return run_id

    def write(self, step: int, row: Row) -> None:
        """Keeps the row of a step until the next flush. Values that are not finite are left out."""
        now = int(time.time() * 1000)
        self._waiting += [
            self._entities.Metric(key_of(name), float(value), now, step)
            for name, value in row.items()
            if math.isfinite(value)
        ]
        if len(self._waiting) >= _MOST_METRICS:
            self.flush()

    def flush(self) -> None:
        """Sends rows that wait, without waiting for the service."""
        for start in range(0, len(self._waiting), _MOST_METRICS):
            part = self._waiting[start : start + _MOST_METRICS]
            self._sent.append(self._client.log_batch(self.run_id, metrics=part, synchronous=False))
        self._waiting = []

    def close(self, is_finished: bool) -> None:
        """Waits until all rows are sent."""
        self.flush()
        for operation in self._sent:
            operation.wait()
        self._client.set_terminated(self.run_id, "FINISHED" if is_finished else "FAILED")


def key_of(name: str) -> str:
    """Returns a name that MLflow accepts: `a[1].b` becomes `a.1.b`."""
    return re.sub(r"[^\w\-. :/]", "", name.replace("[", "."))
