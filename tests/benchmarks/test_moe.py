# tests: /benchmarks/moe.py
"""Runs the benchmark of layers with experts at tiny sizes."""

import json

import numpy as np
import pytest

from benchmarks import moe
from tests.benchmarks.running import run

SMALL = (
    "--repeats=2",
    "--gemm_size=16",
    "--model_dim=8",
    "--hidden_dim=12",
    "--tokens=16",
)


@pytest.mark.slow
def test_moe_measures_each_dispatch(capsys, tmp_path):
    path = tmp_path / "moe.json"
    small = ["--group_size=8", "--experts=4", "--skew=0.5"]
    code, out, _ = run(capsys, "moe", f"--json={path}", *SMALL, *small)
    assert code == 0 and "to dense" in out
    rows = json.loads(path.read_text())["rows"]
    assert [(row["dispatch"], row["load"]) for row in rows] == [
        ("gather", "learned"),
        ("einsum", "learned"),
        ("gather", "balanced"),
        ("dropless", "balanced"),
        ("gather", "skewed"),
        ("dropless", "skewed"),
    ]
    for row in rows:
        assert row["experts"] == 4
        assert 0 < row["routing_share"] and 0 < row["gemm_ratio"]
        assert 0 < row["temporary_bytes"] < row["peak_bytes"]
        assert row["load"] == "learned" or row["dropped_share"] == 0


def test_ratios_are_medians_over_alternating_runs():
    """The machine is twice as slow in the second turn; the dense step is disturbed in the third."""
    case = moe.Case(4, "gather", "learned", 1.0)
    sizes = moe.Sizes(8, 8, 16, 8)
    seconds = np.array([[1.1, 1.0, 0.11, 0.55], [2.2, 2.0, 0.22, 1.1], [1.1, 5.0, 0.11, 0.55]])
    row = moe._row(case, sizes, seconds.T, 0.0, (2, 1))
    assert row.ratio_to_dense == pytest.approx(1.1)
    assert (row.milliseconds, row.dense_milliseconds) == (1100, 2000)
    assert row.routing_share == pytest.approx(0.1) and row.gemm_ratio == pytest.approx(0.5)
    assert row.gemm_rate == pytest.approx(sizes.useful / 0.55)


def test_numbers_of_experts_are_integers(capsys):
    code, out, err = run(capsys, "moe", "--experts=eight")
    assert code == 1 and out == ""
    assert "--experts=eight: expected positive integers" in err
