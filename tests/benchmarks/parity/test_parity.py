# tests: /benchmarks/parity/, wings/open_models/families/
"""python -m benchmarks parity: every family and option computes what transformers computes."""

import json
import os

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.parity.cases import CASES
from benchmarks.parity.peer import LIBRARIES
from benchmarks.peer_python import find_python

FAMILIES = sorted({case.model_type for case in CASES})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(family, tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), LIBRARIES)
    if not python:
        pytest.skip("transformers is not installed, and PEERS_PYTHON names no Python with it")
    flags = [f"--peers_python={python}", f"--families={family}", f"--json={tmp_path}/rows.json"]
    assert benchmarks.main(["benchmarks", "parity", *flags]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["family"] for row in rows] == [family] * len(rows) and rows
    for row in rows:
        assert row["logits"] < 1e-4 and row["gradients"] < 1e-4, row
        assert row["equal_tokens"] == row["tokens"] == 48, row
        assert row["is_bit_equal"] and row["exported"] < 1e-5, row
