# tests: wings/preparation/prepared/base_input.py, wings/preparation/prepared/translation_input.py
"""Tests training on prepared data: compilations of buckets, and runs that are killed."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import rich.console

import lingvo_gshard as gshard
from lingvo_gshard.training.run.monitoring.metrics import BATCH_DIGEST, METRICS_FILE
from tests.preparation.prepared import corpora
from tests.preparation.prepared.prepared_train import prepared_experiment

ROOT = pathlib.Path(__file__).resolve().parents[3]
KILLS = 20
STEPS = 400


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "prepared"
    corpora.prepare(path)
    return path


def rows_of(logdir):
    """Returns the rows of a run's metrics."""
    try:
        lines = (logdir / METRICS_FILE).read_text().splitlines()
    except OSError:
        return []
    # The last line of a run that was killed may be cut short.
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.slow
def test_each_bucket_is_compiled_once(directory, tmp_path):
    params = prepared_experiment()
    params.input.set(directory=str(directory), short_buckets=((16, 8, 5), (12, 12, 8)))
    with open(os.devnull, "w", encoding="utf-8") as null:
        gshard.train(
            params, tmp_path / "run", steps=60, console=rich.console.Console(file=null, width=100)
        )
    lines = (tmp_path / "run" / "compilations.jsonl").read_text().splitlines()
    compiled = [json.loads(line) for line in lines]
    shapes = [row["inputs"]["source_ids"] for row in compiled if row["function"] == "train"]
    assert sorted(map(str, shapes)) == sorted({str(shape) for shape in shapes})
    assert len(shapes) == 3


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_double_nothing(directory, tmp_path):
    """The batches of all steps are those of an undisturbed run, and so are their losses."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    command = [sys.executable, "-m", "tests.preparation.prepared.prepared_train", "--experiment"]
    command += ["test.prepared", f"--steps={STEPS}", "--logdir"]
    settings = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    subprocess.run([*command, undisturbed], check=True, **settings, **quiet)
    draw, kills = random.Random(0), 0
    while kills < KILLS:
        before = len(rows_of(killed))
        with subprocess.Popen([*command, killed], **settings, **quiet) as process:
            goal = before + draw.randrange(2, STEPS // KILLS)
            while process.poll() is None and len(rows_of(killed)) < goal:
                time.sleep(0.01)
            time.sleep(0.05 * draw.random())
            process.send_signal(signal.SIGKILL)
            _, problem = process.communicate()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, problem.decode()
            break
        kills += 1
    finished = subprocess.run([*command, killed], check=False, **settings, **quiet)
    assert finished.returncode == 0, finished.stderr.decode()
    assert kills == KILLS
    keys = ("step", BATCH_DIGEST, "loss")
    one, two = ([[row[key] for key in keys] for row in rows_of(x)] for x in (undisturbed, killed))
    assert [row[0] for row in one] == list(range(1, STEPS + 1))
    assert two == one
    # No batch is trained on twice.
    assert len({row[1] for row in one}) == STEPS
