"""Checks that curves are thinned without losing a spike, and what else metrics say of a run."""

import json
import time

import pytest

from lingvo_gshard.wings.reporting import curves
from tests.reporting import example_runs


def history_of(tmp_path, rows, points=400, layer_points=10**6):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return curves.read_history(path, points, layer_points)


@pytest.mark.parametrize("intervals", [1000, 100, 33, 7, 1])
def test_each_interval_has_mean_and_extremes_of_its_steps(tmp_path, intervals):
    rows = [example_runs.metrics(step, 100) for step in range(1, 101)]
    found = history_of(tmp_path, rows, intervals).curves
    assert len(found.first) <= intervals
    assert found.first[0] == 1 and found.last[-1] == 100
    assert found.first[1:] == [last + 1 for last in found.last[:-1]]
    for name in ("loss", "gradient_norm"):
        curve = found.metrics[name]
        for index, (first, last) in enumerate(zip(found.first, found.last, strict=True)):
            values = [row[name] for row in rows[first - 1 : last]]
            assert curve.mean[index] == pytest.approx(sum(values) / len(values), rel=1e-4)
            if intervals < 100:
                assert curve.low[index] == pytest.approx(min(values), rel=1e-4)
                assert curve.high[index] == pytest.approx(max(values), rel=1e-4)
        if intervals >= 100:
            assert curve.low == curve.high == []


def test_a_single_spike_of_a_long_run_stays_visible(tmp_path):
    rows = [{"step": step, "loss": 100.0 if step == 7777 else 1.0} for step in range(1, 20001)]
    started = time.monotonic()
    found = history_of(tmp_path, rows).curves
    assert time.monotonic() - started < 10
    assert len(found.first) == 400
    (index,) = [i for i, high in enumerate(found.metrics["loss"].high) if high == 100]
    assert found.first[index] <= 7777 <= found.last[index]
    assert max(found.metrics["loss"].mean) < 4


def test_metrics_that_come_and_go_have_gaps(tmp_path):
    rows = [{"step": step, "loss": 1.0} for step in range(1, 11)]
    rows[4]["late"] = 5.0
    rows[7]["loss"] = None
    found = history_of(tmp_path, rows)
    assert found.curves.metrics["late"].mean == [None] * 4 + [5.0] + [None] * 5
    assert found.curves.metrics["loss"].mean[7] is None
    assert found.not_finite == curves.Marked(1, [8])


def test_layers_and_the_dev_split_are_kept_apart(tmp_path):
    rows = [example_runs.metrics(step, 400) for step in range(1, 401)]
    found = history_of(tmp_path, rows, 400, 6 * 40)
    assert not any("/" in name for name in found.curves.metrics)
    assert len(found.layers.first) == 40
    assert {
        f"{layer}/dropped_share" for layer in example_runs.LAYERS
    } <= found.layers.metrics.keys()
    assert found.dev["loss"].steps == list(range(50, 401, 50))
    assert found.dev["loss"].values[-1] == pytest.approx(rows[-1]["dev/loss"], rel=1e-4)
    assert found.spikes == curves.Marked(2, list(example_runs.SPIKES))
    mean = sum(row["loss"] for row in rows[-50:]) / 50
    assert found.tail["loss"] == pytest.approx(mean)


def test_damaged_rows_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"loss":2.0}\n\xff{\n{"step":3,"loss":1.0}\n{"step":4,"lo')
    found = curves.read_history(path, 10, 10)
    assert (found.first_step, found.last_step, found.rows) == (1, 3, 2)


@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_no_rows_are_no_history(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert curves.read_history(path, 10, 10) is None


def test_many_evaluations_keep_the_best_and_the_last(tmp_path):
    rows = [{"step": step, "loss": 1.0, "dev/loss": 2.0 + step % 7} for step in range(1, 5001)]
    rows[1233]["dev/loss"], rows[4321]["dev/loss"] = 0.5, 99.0
    rows[9]["dev/a.b/load"] = 1.0
    found = history_of(tmp_path, rows).dev
    assert found.keys() == {"loss"}
    assert len(found["loss"].steps) <= 503
    best = found["loss"].values.index(0.5)
    assert found["loss"].steps[best] == 1234
    assert max(found["loss"].values) == 99.0 and found["loss"].steps[-1] == 5000


def test_few_evaluations_are_all_kept(tmp_path):
    rows = [{"step": step, "dev/loss": float(step)} for step in range(1, 501)]
    assert history_of(tmp_path, rows).dev["loss"].steps == list(range(1, 501))
