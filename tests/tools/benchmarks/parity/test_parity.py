"""gshard-bench parity: every family and option computes what transformers computes."""

import json
import os

import pytest

from lingvo_gshard.tools import bench
from lingvo_gshard.tools.benchmarks.parity.cases import CASES
from lingvo_gshard.tools.benchmarks.parity.peer import LIBRARIES
from lingvo_gshard.tools.benchmarks.peer_python import find_python

FAMILIES = sorted({case.model_type for case in CASES})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(family, tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), LIBRARIES)
    if not python:
        pytest.skip("transformers is not installed, and PEERS_PYTHON names no Python with it")
    flags = [f"--peers_python={python}", f"--families={family}", f"--json={tmp_path}/rows.json"]
    assert bench.main(["gshard-bench", "parity", *flags]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["family"] for row in rows] == [family] * len(rows) and rows
    for row in rows:
        assert row["logits"] < 1e-4 and row["gradients"] < 1e-4, row
        assert row["equal_tokens"] == row["tokens"] == 32, row
        assert row["is_bit_equal"] and row["exported"] < 1e-5, row


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="--families=lama is unknown. Did you mean 'llama'?"):
        bench.main(["gshard-bench", "parity", "--families=lama"])


def test_a_python_without_transformers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has not all of torch and transformers"):
        bench.main(["gshard-bench", "parity", f"--peers_python={tmp_path}/none"])
