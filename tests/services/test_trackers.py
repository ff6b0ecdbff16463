# tests: wings/services/trackers.py, training/run/monitoring/metrics_log.py
"""Checks that services get the rows of metrics.jsonl, and that none of them can end a run.

Stand-ins for the services always run. The real packages, in their offline modes, are tested where
they are installed: `pip install -e '.[wandb,mlflow]'`.
"""

import importlib.util
import json
import math
import struct
import time
import types

import pytest
import rich.console

from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.run.monitoring.metrics_log import MetricsLog
from lingvo_gshard.training.run.monitoring.step_observer import ObservedRun, StepObservers
from lingvo_gshard.wings.services import trackers
from tests import tiny

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed"
)
needs_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed"
)
LAYER = "encoder.layers[1].feed_forward/dropped_share"


class FakeWriter:
    """Keeps what it gets; raises an error at one step."""

    def __init__(self, fails_at=None):
        self.rows, self.flushes, self.finished = [], 0, None
        self._fails_at = fails_at
        self.run_id, self.place = "an id", "somewhere"

    def write(self, step, row):
        if step == self._fails_at:
            raise ConnectionError("no route\nto host")
        self.rows.append((step, dict(row)))

    def flush(self):
        self.flushes += 1

    def close(self, is_finished):
        self.finished = is_finished


def log_rows(tmp_path, names, steps=range(1, 7), step=0):
    """Logs some steps of a run with writers; returns what was said."""
    console = rich.console.Console(quiet=True)
    params = tiny.experiment_params(steps=100)
    params.run.set(writers=names, log_every_steps=2)
    (tmp_path / "params.txt").write_text("name : 'a'\nstep.seed : 1\n", encoding="utf-8")
    said = []
    run = ObservedRun(
        *(params, None, None, None, None, Logdir(tmp_path), None, None, step + 1, console), step
    )
    run.say = said.append
    log = StepObservers([MetricsLog(run), *filter(None, [trackers.tracking(run)])])
    log.go_on(None)
    log.begin()
    for number in steps:
        row = {"loss": 1.0 / number, LAYER: 0.25, "spike": math.nan if number == 3 else 0.0}
        log.record(number, row)
    log.finish()
    log.at_end()
    return said


@pytest.fixture
def fakes(monkeypatch):
    """Puts stand-ins for the services."""
    made = {"wandb": FakeWriter(), "mlflow": FakeWriter()}
    for name in made:
        monkeypatch.setitem(trackers.TRACKERS, name, lambda *_, name=name: made[name])
    return made


def test_services_get_the_rows_of_the_file(tmp_path, fakes):
    places = [f"{name} gets the metrics of this run: somewhere" for name in fakes]
    assert log_rows(tmp_path, ("wandb", "mlflow")) == places
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for fake in fakes.values():
        assert [step for step, _ in fake.rows] == [row["step"] for row in rows]
        assert [row["loss"] for _, row in fake.rows] == [row["loss"] for row in rows]
        assert (fake.flushes, fake.finished) == (3, True)
    ids = json.loads((tmp_path / "writers.json").read_text())
    assert ids == {"wandb": "an id", "mlflow": "an id"}


def test_a_service_that_fails_is_left_out_and_the_run_goes_on(tmp_path, fakes):
    fakes["wandb"] = FakeWriter(fails_at=3)
    said = log_rows(tmp_path, ("wandb", "mlflow"))
    assert said[2:] == ["Warning: wandb gets no more rows of this run (no route to host)"]
    assert [step for step, _ in fakes["wandb"].rows] == [1, 2]
    assert [step for step, _ in fakes["mlflow"].rows] == [1, 2, 3, 4, 5, 6]


def test_a_service_that_cannot_be_reached_at_the_start_is_left_out(tmp_path, monkeypatch):
    def unreachable(logdir, params, known):
        raise TimeoutError("timed out")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", unreachable)
    assert log_rows(tmp_path, ("wandb",)) == ["Warning: wandb gets no rows of this run (timed out)"]
    assert not (tmp_path / "writers.json").exists()


def test_without_writers_nothing_is_written(tmp_path):
    assert log_rows(tmp_path, ()) == []
    assert not (tmp_path / "writers.json").exists()


def test_unknown_names_and_missing_packages_are_named(monkeypatch):
    trackers.check(())
    with pytest.raises(ValueError, match="`writer=wanbd` is unknown. Did you mean 'wandb'?"):
        trackers.check(("wanbd",))
    with pytest.raises(ValueError, match=r"run.writers is 'wandb'; .* such as \('wandb',\)"):
        trackers.check("wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package mlflow.*pip install mlflow"):
        trackers.check(("mlflow",))


def test_mlflow_gets_names_that_it_accepts_in_requests_of_its_size(tmp_path, monkeypatch):
    sent = []

    class Client:
        def get_experiment_by_name(self, name):
            return types.SimpleNamespace(experiment_id=name)

        def create_run(self, number, run_name):
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{number}/{run_name}"))

        def log_batch(self, run_id, metrics=(), params=(), synchronous=True):
            sent.append((list(metrics), list(params), synchronous))
            return types.SimpleNamespace(wait=lambda: None)

        def set_terminated(self, run_id, status):
            sent.append(status)

    entities = types.SimpleNamespace(Metric=lambda *a: a, Param=lambda *a: a)
    mlflow = types.SimpleNamespace(MlflowClient=Client, get_tracking_uri=lambda: "a")
    modules = {"mlflow": mlflow, "mlflow.entities": entities}
    monkeypatch.setattr(trackers.importlib, "import_module", modules.get)
    params = {f"path{index}": "x" * 1000 for index in range(150)}
    tracker = trackers.MlflowTracker(tmp_path, params, None)
    assert [len(call[1]) for call in sent] == [100, 50]
    assert all(len(value) <= 500 for _, value in sent[0][1])
    del sent[:]
    for step in range(700):
        tracker.write(step, {LAYER: 0.5, "loss": math.inf, "a": 1.0})
    tracker.close(True)
    assert [len(call[0]) for call in sent[:-1]] == [1000, 400] and sent[-1] == "FINISHED"
    assert sent[0][0][0][:2] == ("encoder.layers.1.feed_forward/dropped_share", 0.5)
    assert not any(call[2] for call in sent[:-1])


@needs_wandb
def test_weights_and_biases_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    found = []
    for steps in (range(1, 5), range(5, 7)):
        (said,) = log_rows(tmp_path, ("wandb",), steps, steps[0] - 1)
        assert said.startswith(f"wandb gets the metrics of this run: {tmp_path}/wandb/offline-run-")
        # The names of offline files have the second of the start.
        time.sleep(1.1)
        found.append(json.loads((tmp_path / "writers.json").read_text())["wandb"])
    # A resumed run goes on with the service's record of it.
    assert found[0] == found[1]
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{found[0]}/run-*.wandb"))
    assert _wandb_steps(files) == [1, 2, 3, 4, 5, 6]


def _wandb_steps(files):
    """Returns the steps in the files that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2

    steps = []
    for data in _log_records(sorted(files)):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            assert {"loss", LAYER} <= items.keys()
            assert json.loads(items["loss"]) == pytest.approx(1 / int(items["_step"]))
            steps.append(int(items["_step"]))
    return steps


def _log_records(files):
    """Yields the records of files in LevelDB's log format, after their header of seven bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    for file in files:
        data, at, whole = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            # A record is whole (1), or ends here (4).
            if kind in (1, 4):
                yield whole
                whole = b""


@needs_mlflow
def test_mlflow_in_a_local_database(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(None)
    said = log_rows(tmp_path, ("mlflow",), range(1, 5))
    assert log_rows(tmp_path, ("mlflow",), range(5, 7), 4) == said
    client = mlflow.MlflowClient()
    run_id = json.loads((tmp_path / "writers.json").read_text())["mlflow"]
    assert said == [
        f"mlflow gets the metrics of this run: run {run_id} at sqlite:///{tmp_path}/mlflow.db"
    ]
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params == {"name": "'a'", "step.seed": "1"}
    history = client.get_metric_history(run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(s, 1.0 / s) for s in range(1, 7)]
    name = "encoder.layers.1.feed_forward/dropped_share"
    assert len(client.get_metric_history(run_id, name)) == 6
    assert len(client.get_metric_history(run_id, "spike")) == 5
