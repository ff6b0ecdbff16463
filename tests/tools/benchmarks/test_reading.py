# tests: tools/benchmarks/reading.py, /benchmarks/input/
"""gshard-bench input and python -m benchmarks input, on a little made text."""

import json

import numpy as np
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.input import made_text, training
from lingvo_gshard.core.config import registry
from lingvo_gshard.tools import bench
from lingvo_gshard.tools.console import startup
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from tests.tools.test_bench import EXPERIMENT, tiny_translation

ROWS = 600


def run(capsys, program, *arguments) -> list[dict]:
    """Returns the rows of the JSON."""
    code = startup.guarded(program.NAME, program.main)([program.NAME, *arguments, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "tokens/s" in captured.err
    return json.loads(captured.out)["rows"]


def test_made_text_has_copies_and_empty_sides(tmp_path):
    made_text.write_tsv(tmp_path / "made.tsv", 2001)
    rows = [line.split("\t") for line in (tmp_path / "made.tsv").read_text().splitlines()]
    assert len(rows) == 2001 and {len(row) for row in rows} == {3}
    assert sum(not source for _, source, _ in rows) == 2
    assert len({tuple(row) for row in rows}) == pytest.approx(2001 * 0.95, abs=3)
    assert len({language for language, _, _ in rows}) == made_text.LANGUAGES


def test_prepared_data_is_read_as_fast_as_it_is_made(capsys, tmp_path, monkeypatch):
    made_text.write_tsv(tmp_path / "made.tsv", ROWS)
    directory = str(tmp_path / "prepared")
    manifest = prepare(directory, [str(tmp_path / "made.tsv")], PrepareOptions(workers=1))
    rows = run(capsys, bench, "input", f"--prepared={directory}")
    assert [row["source_length"] for row in rows] == [128, 512]
    tokens = [sum(group.tokens[side] for group in _groups(directory)) for side in range(2)]
    for row in rows:
        assert row["rows"] == manifest.rows("train")
        ratio = row["target_length"] / row["source_length"]
        assert ratio == pytest.approx(min(1.0, tokens[1] / tokens[0]), abs=0.05)
        assert 0.8 < row["filled"] <= 1 and row["first_seconds"] > 0
        # A row of the data has as many tokens on average, whatever the batches are.
        mean = row["tokens_per_second"] / row["rows_per_second"]
        assert mean == pytest.approx(sum(tokens) / manifest.rows("train"), rel=0.1)
    monkeypatch.setitem(registry._EXPERIMENTS._features, EXPERIMENT, tiny_translation)
    monkeypatch.setattr(training, "_OF_STEPS", EXPERIMENT)
    *read, trained = run(capsys, benchmarks, "input", f"--prepared={directory}")
    assert [row["measure"] for row in (*read, trained)] == ["read", "read", "train"]
    assert 0 < trained["wait_share"] < 1 and trained["tokens_per_cpu_second"] == 0
    assert np.allclose([row["filled"] for row in read], [row["filled"] for row in rows])


def _groups(directory):
    from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput

    params = PreparedTranslationInput.params().set(directory=directory, batch_rows=1)
    return params.instantiate().table("train").groups


@pytest.mark.slow
def test_made_text_is_prepared_and_read(capsys):
    prepared, *rest = run(capsys, benchmarks, "input", "--rows=3000", "--workers=2")
    assert (prepared["rows"], prepared["workers"], len(rest)) == (3000, 2, 3)
    # A twentieth are copies; few of these 3000 rows are lost for other reasons.
    assert 0.85 * 3000 < prepared["kept"] <= 0.95 * 3000 + 3
    assert prepared["rows_per_second"] > 0 and prepared["peak_bytes"] > 2**20
