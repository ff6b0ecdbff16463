"""Statistics of stored weights, compared with NumPy, and what gshard-inspect --logdir prints."""

import json
import math
import re

import numpy as np
import pytest

from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.tools import inspect
from lingvo_gshard.tools.inspection import weights
from lingvo_gshard.tools.inspection.weights import StoredWeights, statistics
from lingvo_gshard.training import experiments
from lingvo_gshard.training.run.checkpoint.store import CheckpointStore


def spec(path, layout, array):
    return VariableSpec(path, layout, array.shape, "float32", initializers.constant(0.0))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Returns the directory of two checkpoints, their weights by step, and the declarations."""
    directory = tmp_path_factory.mktemp("checkpoints")
    generator = np.random.default_rng(0)
    first = {
        "w": generator.normal(0.3, 2.0, (6, 50, 4)).astype(np.float32),
        "same": generator.normal(size=(7,)).astype(np.float32),
    }
    first["w"][0, :5] = 0.0
    second = {"w": first["w"] * np.float32(1.01), "same": first["same"]}
    second["w"][2, 3, 1], second["w"][5, 49, 3] = np.nan, np.inf
    store = CheckpointStore(directory)
    for step, theta in ((10, first), (20, second)):
        moments = NestedMap(same=NestedMap(first=np.zeros(7, np.float32)))
        state = NestedMap(theta=NestedMap(theta), moments=moments)
        store.save(step, state, None, "")
    store.finish()
    store.close()
    specs = {"w": spec("w", "EMH", first["w"]), "same": spec("same", "M", first["same"])}
    return directory, {10: first, 20: second}, specs


@pytest.mark.parametrize("most_bytes", [2**28, 64])
def test_statistics_are_those_of_numpy(stored, monkeypatch, most_bytes):
    directory, arrays, specs = stored
    monkeypatch.setattr(weights, "_MOST_BYTES", most_bytes)
    opened = [StoredWeights.open(directory, step, "step") for step in (20, 10)]
    found = {row.path: row for row in statistics(opened[0], specs, opened[1])}
    w, before = (arrays[step]["w"].astype(np.float64) for step in (20, 10))
    finite = w[np.isfinite(w)]
    row = found["w"]
    assert row.mean == pytest.approx(finite.mean())
    assert row.deviation == pytest.approx(finite.std())
    assert row.largest == np.abs(finite).max()
    assert row.zeros == (finite == 0).sum() / w.size == 20 / 1200
    assert (row.not_finite, row.shape, row.layout) == (2, (6, 50, 4), "EMH")
    assert math.isnan(row.difference.relative) and not row.difference.is_equal
    assert found["same"].difference.is_equal and found["same"].difference.relative == 0
    (row, _) = statistics(opened[1], specs)
    assert row.difference is None and row.mean == pytest.approx(before.mean())


def test_the_relative_difference_is_that_of_the_norms(stored):
    directory, arrays, specs = stored
    opened = StoredWeights.open(directory, 10, "step")
    (row, _) = statistics(opened, specs, StoredWeights.open(directory, 10, "step"))
    assert row.difference.is_equal
    changes = weights._DifferenceSums()
    changes.add(arrays[10]["w"] * 3, arrays[10]["w"], "w")
    assert changes.result().relative == pytest.approx(2.0)
    with pytest.raises(ValueError, match=re.escape("--compare: w has the shape [6] here and [7]")):
        changes.add(np.zeros(6), np.zeros(7), "w")


def test_a_missing_step_is_refused_with_those_that_exist(stored, tmp_path):
    with pytest.raises(ValueError, match=r"--step=15: there are checkpoints of the steps 10, 20"):
        StoredWeights.open(stored[0], 15, "step")
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        StoredWeights.open(tmp_path, None, "step")


def test_a_run_is_inspected_and_compared_with_itself(
    language_model_logdir, tmp_path, capsys, monkeypatch
):
    # This makes a trainer with the configured vocabulary, which a run may not have filled.
    monkeypatch.delattr(experiments, "make_trainer")
    path = tmp_path / "weights.json"
    flags = [f"--logdir={language_model_logdir}", f"--compare={language_model_logdir}"]
    flags += ["--mesh=data=2", "--strategy=expert", "--placement=*.experts.w_in"]
    assert inspect.main(["gshard-inspect", *flags, f"--json={path}"]) == 0
    out = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["step"] == record["compared_step"] == 30
    rows = {row["path"]: row for row in record["statistics"]}
    assert all(row["difference"]["is_equal"] for row in rows.values())
    assert {path: row["shape"] for path, row in rows.items()} == {
        row["path"]: row["shape"] for row in record["weights"]
    }
    scale = rows["decoder.final_norm.scale"]
    assert abs(scale["mean"] - 1) < 0.2 and scale["not_finite"] == 0
    (placed,) = record["placement"]
    assert [part["ranges"][0] for part in placed["parts"]] == [[0, 2], [2, 4]]
    assert re.search(r"0 to 1 .* 0\s*\n2 to 3 .* 1\s*\n", out)
    assert "not finite" in out and "equal" in out


def test_flags_of_an_experiment_do_not_go_with_a_run(language_model_logdir):
    flags = ["--experiment=translation.quickstart", f"--logdir={language_model_logdir}"]
    with pytest.raises(ValueError, match="--experiment=.* does not go with --logdir"):
        inspect.main(["gshard-inspect", *flags])
    with pytest.raises(ValueError, match="--placement: no layer or weight is named '.*w_inn'"):
        inspect.main(["gshard-inspect", *flags[1:], "--mesh=data=2", "--placement=*.w_inn"])
