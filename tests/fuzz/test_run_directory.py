# tests: training/run/logdir.py, wings/services/run_lock.py, wings/services/run_records.py
# tests: wings/services/inventory.py, training/run/checkpoint/run_item.py
# tests: training/run/monitoring/metrics.py, wings/services/routers/router_records.py
# tests: wings/services/metrics_rows.py
# tests: wings/reporting/run.py
"""Fuzzes what reads the directory of a run: an answer or a sentence, and never a long wait.

Each file of a run is replaced by what is no regular file, by a file without an end, and by changed
content. Then everything that reads runs is called.
"""

import contextlib
import pathlib
import random
import shutil

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.checkpoint import run_item
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.run.monitoring import metrics
from lingvo_gshard.wings.reporting import run as reporting
from lingvo_gshard.wings.services import (
    inventory,
    metrics_rows,
    roll_back,
    run_lock,
    run_records,
    trackers,
)
from lingvo_gshard.wings.services.routers import router_records
from tests import tiny
from tests.fuzz.odd_files import ODD
from tests.fuzz.test_readers import changed
from tests.fuzz.within import within
from tests.reporting import example_runs

SECONDS = 20
# Changed directories in `make test`, and in `make test-all`.
FEW, MANY = 60, 1_000
STEP = 7


def write_run(directory: pathlib.Path) -> pathlib.Path:
    """Writes a run with a checkpoint without arrays."""
    logdir = example_runs.write_run(directory, steps=60)
    (logdir / "params.txt").write_text(tiny.experiment_params().to_text())
    (logdir / trackers.TRACKERS_FILE).write_text('{"wandb": "x"}')
    (logdir / "run.lock").write_text("{}")
    checkpoint = logdir / "checkpoints" / str(STEP)
    record = run_item.RunRecord(STEP, {"index": 3}, run_item.versions(), {"theta": {"w": 5}})
    (checkpoint / run_item.ITEM).mkdir(parents=True)
    run_item.write_run(checkpoint / run_item.ITEM, record, tiny.experiment_params().to_text(), None)
    (checkpoint / "theta").mkdir()
    (checkpoint / "theta" / "array").write_bytes(b"x" * 100)
    return logdir


def uses(logdir: pathlib.Path) -> dict:
    """Returns what a user does with a run, by name."""

    def resume() -> None:
        writer = metrics.MetricsWriter(logdir, STEP, lambda text: None)
        writer.write(STEP + 1, {"loss": 1.0})
        writer.close()

    def claim() -> None:
        with Logdir(logdir).locked(lambda text: None):
            pass

    ids = logdir / trackers.TRACKERS_FILE
    return {
        "report": lambda: reporting.read_run(logdir, "run", 100, 100),
        "params": lambda: Logdir(logdir).read_params(),
        "params as text": lambda: Logdir(logdir).params_as_text(),
        "last rows": lambda: metrics_rows.first_and_last(logdir / metrics.METRICS_FILE, STEP, 3),
        "rows": lambda: list(metrics_rows.rows_until(logdir / metrics.METRICS_FILE, STEP)),
        "resume": resume,
        "launch": lambda: run_records.append_launch(logdir, example_runs._launch(1, 2, "x")),
        "routers": lambda: router_records.RecordsFile(logdir, STEP, lambda text: None).append([]),
        "roll backs": lambda: roll_back.count_roll_backs(logdir),
        "trackers": lambda: run_records.read_record(ids, dict[str, str]),
        "checkpoints": lambda: inventory.facts(logdir / "checkpoints"),
        "checkpoint": lambda: run_item.read_run(logdir / "checkpoints" / str(STEP)),
        "arrays": lambda: inventory.problem_of(logdir / "checkpoints", STEP),
        "claim": claim,
    }


def use_all(logdir: pathlib.Path, about: object) -> None:
    for name, use in uses(logdir).items():
        with within(SECONDS, (name, about)), contextlib.suppress(ValueError, OSError):
            use()


def files_of(logdir: pathlib.Path) -> list[str]:
    return sorted(str(one.relative_to(logdir)) for one in logdir.rglob("*") if one.is_file())


def replace(logdir: pathlib.Path, name: str, kind: str) -> None:
    path = logdir / name
    path.unlink()
    ODD[kind](path)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """A lock of a process that cannot be seen is waited for, which is told."""
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(run_lock, "_LOOK_SECONDS", 0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run")


def test_the_run_is_one(whole, tmp_path):
    """What is not damaged raises nothing, so that the other tests test something."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "run.lock").unlink()
    for name, use in uses(tmp_path / "run").items():
        if name not in ("arrays", "params"):
            use()
    assert len(files_of(whole)) > 8


@pytest.mark.parametrize("kind", ODD)
def test_files_that_are_no_files_are_refused_at_once(whole, tmp_path, kind):
    names = files_of(whole)
    for number, name in enumerate(names):
        logdir = tmp_path / f"run-{number}"
        shutil.copytree(whole, logdir)
        replace(logdir, name, kind)
        use_all(logdir, (name, kind))


def check_changed(whole: pathlib.Path, folder: pathlib.Path, count: int) -> None:
    rng, names = random.Random("runs"), files_of(whole)
    for number in range(count):
        logdir = folder / f"run-{number}"
        shutil.copytree(whole, logdir)
        for name in rng.sample(names, rng.choice([1, 1, 2])):
            path = logdir / name
            path.write_bytes(changed(path.read_bytes(), rng))
        use_all(logdir, logdir)
        shutil.rmtree(logdir)


def test_changed_files_are_read_or_refused(whole, tmp_path):
    check_changed(whole, tmp_path, FEW)


@pytest.mark.slow
def test_many_changed_files_are_read_or_refused(whole, tmp_path):
    check_changed(whole, tmp_path, MANY)


def test_a_pipe_is_refused_by_name(whole, tmp_path):
    logdir = tmp_path / "run"
    shutil.copytree(whole, logdir)
    replace(logdir, metrics.METRICS_FILE, "pipe")
    with pytest.raises(UserError, match="metrics.jsonl .*: this is a named pipe; a regular file"):
        metrics.MetricsWriter(logdir, STEP)
