# tests: training/run/monitoring/metrics.py, training/run/monitoring/metrics_log.py
"""Checks that metrics.jsonl has one row per step, even after damage or a full disk."""

import errno
import json
import math
import os

import numpy as np
import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.training.run.monitoring.metrics import METRICS_FILE, MetricsWriter
from lingvo_gshard.wings.services.metrics_rows import first_and_last, rows_of_run


def write_rows(path, step, rows, say=print):
    writer = MetricsWriter(path, step, say)
    for number, row in rows:
        writer.write(number, row)
    writer.close()


def read(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_floats_are_not_rounded(tmp_path):
    value = float(np.float32(0.1))
    write_rows(tmp_path, 0, [(1, {"loss": value})])
    assert read(tmp_path) == [{"step": 1, "loss": value}]


def test_non_finite_values_are_null(tmp_path):
    write_rows(tmp_path, 0, [(1, {"loss": 1.0, "ratio": math.nan, "perplexity": math.inf})])
    assert read(tmp_path) == [{"step": 1, "loss": 1.0, "ratio": None, "perplexity": None}]


def test_resuming_drops_later_and_damaged_rows(tmp_path):
    write_rows(tmp_path, 0, [(n, {"loss": 1.0}) for n in range(1, 8)])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    write_rows(tmp_path, 5, [(6, {"loss": 2.0})])
    assert [(row["step"], row["loss"]) for row in read(tmp_path)] == [
        *((n, 1.0) for n in range(1, 6)),
        (6, 2.0),
    ]


def test_rows_are_read_while_one_is_written(tmp_path):
    assert rows_of_run(tmp_path) == []
    write_rows(tmp_path, 0, [(n, {"loss": 1.0 / n}) for n in (1, 2)])
    with open(tmp_path / METRICS_FILE, "a") as file:
        file.write('{"step": 3, "lo')
    assert rows_of_run(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_rows_are_kept_until_the_disk_has_space(tmp_path, monkeypatch):
    said = []
    writer = MetricsWriter(tmp_path, 0, said.append)
    write = os.write

    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    def partly(file, data):
        return write(file, data[:7])

    writer.write(1, {"loss": 1.0})
    monkeypatch.setattr(os, "write", full)
    writer.write(2, {"loss": 2.0})
    writer.write(3, {"loss": 3.0})
    assert len(said) == 1 and "No space left on device" in said[0]
    monkeypatch.setattr(os, "write", partly)
    writer.write(4, {"loss": 4.0})
    writer.close()
    assert [row["step"] for row in read(tmp_path)] == [1, 2, 3, 4]


def test_curves_are_written_for_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, 0)
    for step in (10, 20):
        writer.curves(step, {"loss": step / 2, "encoder.layers[1].moe/load_max_over_mean": 1.5})
    writer.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert set(tags) == {"loss", "encoder.layers[1].moe/load_max_over_mean"}
    assert [event.step for event in events.Tensors("loss")] == [10, 20]


def test_the_first_and_last_rows_of_a_run_are_read_up_to_a_step(tmp_path):
    path = tmp_path / METRICS_FILE
    assert first_and_last(path, 5, 2) == []
    path.write_text(
        "".join(f'{{"step": {step}, "loss": {step}.5}}\n' for step in range(1, 9)) + "{"
    )
    rows = first_and_last(path, 6, 2)
    assert rows == [(1, {"loss": 1.5}), (5, {"loss": 5.5}), (6, {"loss": 6.5})]


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda path: path.unlink(), 5),
        (lambda path: path.write_bytes(b""), 5),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b'{"step":3', b'{"step":\xff')),
            1,
        ),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"loss":2', b'"l\xff":2')), 1),
        (lambda path: path.write_bytes(b"".join(path.read_bytes().splitlines(True)[3:])), 0),
        (lambda path: None, 0),
    ],
)
def test_rows_that_are_lost_are_said(tmp_path, damage, lost):
    """Rows are missing from the beginning where a run was made from another one."""
    writer = MetricsWriter(tmp_path, 0)
    for step in range(1, 9):
        writer.write(step, {"loss": float(step)})
    writer.close()
    damage(tmp_path / "metrics.jsonl")
    said = []
    MetricsWriter(tmp_path, 5, said.append).close()
    words = f"metrics.jsonl lacks the rows of {lost} of the 5 steps so far; they were damaged"
    assert [words in line for line in said] == ([True] if lost else [])


def test_a_run_made_from_another_one_misses_no_rows(tmp_path):
    said = []
    MetricsWriter(tmp_path, 5, said.append).close()
    assert said == []


@pytest.mark.parametrize(
    ("make", "words"), [(os.mkfifo, "a named pipe"), (os.mkdir, "Is a directory")]
)
def test_metrics_that_are_no_file_are_an_error_and_not_waited_for(tmp_path, make, words):
    make(tmp_path / METRICS_FILE)
    with pytest.raises(UserError, match=f"metrics.jsonl cannot have the metrics .*{words}"):
        MetricsWriter(tmp_path, 0)
    assert rows_of_run(tmp_path) == [] and first_and_last(tmp_path / METRICS_FILE, 9, 9) == []
