"""Writes metrics to Weights & Biases and MLflow while a run trains."""

from __future__ import annotations

import importlib.util
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import UserError, atomic, names, processes
from lingvo_gshard.training import MetricsRow, ObservedRun, StepObserver
from lingvo_gshard.wings.services.run_records import read_record

# The file in a log directory that has each service's id of the run.
TRACKERS_FILE = "writers.json"
# The project or experiment that runs are listed under, unless the service's settings name another.
PROJECT = "lingvo_gshard"


class Tracker:
    """Sends rows to one run of a service. Any method may raise an exception of the service.

    Attributes:
      run_id: the service's id of the run.
      place: where people find the run.
    """

    run_id: str
    place: str

    def __init__(self, logdir: pathlib.Path, params: dict[str, str], known: str | None):
        """Starts a run named like the directory, or goes on with `known`. `params` are by path."""

    def write(self, step: int, row: MetricsRow) -> None:
        """Sends the row of a step, soon."""

    def flush(self) -> None:
        """Sends rows that wait, without waiting for the service."""

    def close(self, is_finished: bool) -> None:
        """Waits until all rows are sent. Tells whether the run ended without an error."""


def check(chosen: Sequence[str]) -> None:
    """Checks `run.writers`. Raises UserError for an unknown name or a missing package."""
    if isinstance(chosen, str):
        raise UserError(f"run.writers is {chosen!r}; expected several names, such as ({chosen!r},)")
    for name in chosen:
        names.check(name, TRACKERS, f"`writer={name}` is unknown")
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"`writer={name}` needs the package {name}, which is not installed: pip install "
                f"{name}"
            )


# A run must not wait for a person to log in.
_LOGIN_SECONDS = 30


class WandbTracker(Tracker):
    """Logs rows to one run of Weights & Biases, which sends them from a process of its own.

    The service's own settings hold, such as WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE=offline. The
    run's directory gets the service's files as well. Rows leave at once.
    """

    def __init__(self, logdir: pathlib.Path, params: dict[str, str], known: str | None):
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", logdir.name),
            dir=str(logdir),
            id=known,
            resume="allow",
            config=params,
            # The lines that the run prints stay as they are.
            settings=wandb.Settings(console="off", silent=True, login_timeout=_LOGIN_SECONDS),
        )
        self.run_id: str = self._run.id
        files = pathlib.Path(self._run.dir).parent
        is_offline = self._run.offline
        self.place: str = f"{files}, for `wandb sync`" if is_offline else self._run.url

    def write(self, step: int, row: MetricsRow) -> None:
        """Sends the row of a step. The service ignores steps that it has already."""
        self._run.log(row, step=step)

    def close(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


# MLflow refuses requests with more metrics or params, and longer values.
_MOST_METRICS, _MOST_PARAMS, _LONGEST = 1000, 100, 500


class MlflowTracker(Tracker):
    """Logs rows to one run of MLflow, many in one request, from a thread of MLflow's.

    The service's own settings hold, such as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
    """

    def __init__(self, logdir: pathlib.Path, params: dict[str, str], known: str | None):
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

    def write(self, step: int, row: MetricsRow) -> None:
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
        for start in range(0, len(self._waiting), _MOST_METRICS):
            part = self._waiting[start : start + _MOST_METRICS]
            self._sent.append(self._client.log_batch(self.run_id, metrics=part, synchronous=False))
        self._waiting = []

    def close(self, is_finished: bool) -> None:
        self.flush()
        for operation in self._sent:
            operation.wait()
        self._client.set_terminated(self.run_id, "FINISHED" if is_finished else "FAILED")


def key_of(name: str) -> str:
    """Returns a name that MLflow accepts: `a[1].b` becomes `a.1.b`."""
    return re.sub(r"[^\w\-. :/]", "", name.replace("[", "."))


# Name of a tracker, which is also the package that it needs -> its class.
TRACKERS: dict[str, type[Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


def tracking(run: ObservedRun) -> StepObserver | None:
    """Returns what sends the rows of a run to `run.writers`, if there are any."""
    return _Tracking(run) if run.params.run.writers and processes.is_main() else None


class _Tracking(StepObserver):
    """Sends each row, and waiting rows when a step gets a log line. Leaves out failed services."""

    def __init__(self, run: ObservedRun):
        self._run = run
        self._trackers: dict[str, Tracker] = {}
        self._is_finished = False

    def begin(self) -> None:
        """Opens the trackers, which go on with the service's record of a resumed run."""
        run, file = self._run, self._run.logdir.path / TRACKERS_FILE
        given, ids = run.logdir.params_as_text(), read_record(file, dict[str, str]) or {}
        for name in run.params.run.writers:
            try:
                tracker = TRACKERS[name](run.logdir.path, given, ids.get(name))
                self._trackers[name], ids[name] = tracker, tracker.run_id
                run.say(f"{name} gets the metrics of this run: {tracker.place}")
            except Exception as error:
                # Services fail in many ways, and none of them may end a training run.
                run.say(f"Warning: {name} gets no rows of this run ({_in_a_line(error)})")
        if self._trackers:
            try:
                atomic.replace_file(file, msgspec.json.encode(ids))
            except OSError as error:
                run.say(f"Warning: {TRACKERS_FILE} cannot be written ({error.strerror})")

    def record(self, step: int, row: MetricsRow) -> None:
        """Sends the row of a step."""
        self._call(lambda tracker: tracker.write(step, row))
        if self._run.is_shown(step):
            self._call(lambda tracker: tracker.flush())

    def add_evaluation(self, step: int, dev: MetricsRow) -> None:
        """Sends metrics of the step that the run resumes from."""
        if dev:
            self._call(lambda tracker: tracker.write(step, dev))

    def finish(self) -> None:
        """Notes that the run ends without an error."""
        self._is_finished = True

    def at_end(self) -> None:
        """Ends the trackers."""
        self._call(lambda tracker: tracker.close(self._is_finished))

    def _call(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                # As above.
                del self._trackers[name]
                problem = _in_a_line(error)
                self._run.say(f"Warning: {name} gets no more rows of this run ({problem})")


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
