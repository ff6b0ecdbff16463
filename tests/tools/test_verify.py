"""Tests gshard-verify through its command line."""

import json

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.tools import verify
from lingvo_gshard.tools.console import startup
from tests.tiny import experiment_params
from tests.tools.tiny_quickstart import FLAGS as TINY
from tests.verification import defects


def run_here(capsys, *flags):
    """Returns (exit code, standard output, standard error) of a run in this process."""
    code = startup.guarded(verify.NAME, verify.main)([verify.NAME, *map(str, flags)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["expert_tensor", "zero1", "fsdp"])
def test_the_tiny_quickstart_is_equal(capsys, tmp_path, strategy):
    path = tmp_path / "verified.json"
    flags = ["--mesh=data=4,model=2", f"--strategy={strategy}", f"--json={path}"]
    code, out, _ = run_here(capsys, *TINY, *flags)
    assert code == 0 and "\nequal to " in out, out
    record = json.loads(path.read_text())
    assert record["equal"] and record["first"] is None and record["largest"] < 1e-12
    kinds = {row["kind"] for row in record["compared"]}
    assert kinds == {"output", "loss", "metric", "gradient", "new weight", "counter"}


@pytest.mark.slow
def test_a_difference_is_printed_and_is_the_exit_code(capsys):
    if "test.missing_sum" not in registry.names():
        registry.register("test.missing_sum")(_missing_sum)
    flags = [f"--mesh={defects.MESH}", f"--strategy={defects.STRATEGY}", "--json"]
    code, out, err = run_here(capsys, "--experiment=test.missing_sum", *flags)
    record = json.loads(out)
    assert code == verify.DIFFERENT and not record["equal"]
    assert record["first"]["difference"]["unequal_copies"] == ["model"]
    assert "The first tensor that differs is the output suspect" in err


def _missing_sum():
    """A layer that forgets a sum."""
    return defects.experiment(defects.MissingSum)


def test_what_is_not_verified_has_an_exit_code_of_its_own(capsys):
    if "test.rounded" not in registry.names():
        registry.register("test.rounded")(_rounded)
    flags = ["--experiment=test.rounded", "--mesh=data=2", "--strategy=data"]
    code, out, _ = run_here(capsys, *flags)
    assert code == verify.NOT_VERIFIED, out
    assert "not verified: step.precision = 'float32' instead of 'bfloat16_weights'" in out
    assert "\nequal to " in out


def _rounded():
    """Weights that are rounded at random, which one device does otherwise."""
    params = experiment_params()
    params.step.precision = "bfloat16_weights"
    return params


def test_a_mesh_is_needed(capsys):
    code, _, err = run_here(capsys, *TINY)
    assert code == 1 and "--mesh is missing" in err
