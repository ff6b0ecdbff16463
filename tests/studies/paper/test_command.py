# tests: /studies/paper/
"""Runs python -m studies paper with synthetic plans."""

import json

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.wings.planning.compiling.cache import current_settings
from studies import __main__ as studies
from studies.paper import command
from studies.paper import rows as paper_rows
from tests.planning import example_plan


@pytest.fixture
def planned(monkeypatch):
    """Replaces planning by synthetic plans; returns the list of requested (Params, topology)."""
    calls = []

    def plan_experiment(params, topology, options, progress):
        del options
        progress.begin("tracing and lowering")
        calls.append((params, topology))
        return example_plan.as_plan(example_plan.example_plan())

    monkeypatch.setattr(command, "plan_experiment", plan_experiment)
    return calls


def run(*arguments):
    """Returns the exit code."""
    return studies.main(["studies", "paper", *arguments])


def test_only_plans_of_selected_rows_are_made(planned, tmp_path, capsys):
    path = tmp_path / "paper.json"
    assert run("--rows=activations,weights", f"--json={path}") == 0
    assert [(params.name, topology.name) for params, topology in planned] == [
        ("gshard_paper.moe_128e_12l", "v3:8x8"),
        ("gshard_paper.moe_128e_12l", "v3:8x8"),
        ("gshard_paper.moe_512e_12l", "v3:16x16"),
        ("gshard_paper.moe_2048e_36l", "v3:32x32"),
    ]
    assert [params.input.batch_rows for params, _ in planned] == [2048, 8192, 8192, 32_768]
    record = json.loads(path.read_text())
    synthetic = example_plan.example_plan()["bytes_per_device"]
    row = next(row for row in record["rows"] if row["name"] == "weights.moe_512e_12l")
    assert row["published"] == 2.04
    assert row["ours"] == pytest.approx(synthetic["weights"] / 1e9)
    assert row["ratio"] == pytest.approx(synthetic["weights"] / 2.04e9)
    equal_tokens = "moe_128e_12l_2048_tokens"
    cases = {equal_tokens, "moe_128e_12l", "moe_512e_12l", "moe_2048e_36l"}
    assert set(record["plans"]) == cases
    assert record["plans"]["moe_512e_12l"]["bytes_per_device"] == synthetic
    printed = capsys.readouterr().out
    assert "Plan 1 of 4: moe_128e_12l_2048_tokens on v3:8x8" in printed
    assert "MoE(512E, 12L): weights of a core, GB (figure 7, read off)" in printed
    held = sum(row["within"] for row in record["rows"])
    assert f"{held} of 7 are as expected." in printed


@pytest.mark.slow
def test_all_rows_are_printed(planned, capsys):
    assert run() == 0
    assert len(planned) == len(paper_rows.CASES)
    printed = capsys.readouterr().out
    assert "MoE(2048E, 36L): core-years" in printed
    assert "Not compared:" in printed


def test_json_is_the_only_standard_output(planned, capsys):
    assert run("--rows=steps_bound.moe_512e_12l", "--json") == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)["rows"]
    assert row["name"] == "steps_bound.moe_512e_12l"
    assert "Plan 1 of 1" in captured.err


def test_only_plans_whose_compile_times_are_compared_generate_code(monkeypatch, capsys):
    has_code = {}

    def plan_experiment(params, topology, options, progress):
        has_code[params.name, topology.name] = current_settings().generates_code
        return example_plan.as_plan(example_plan.example_plan())

    monkeypatch.setattr(command, "plan_experiment", plan_experiment)
    assert run("--rows=compile_time.depth,weights.moe_512e_12l") == 0
    assert has_code == {
        ("gshard_paper.moe_512e_12l", "v3:16x16"): False,
        ("gshard_paper.moe_2048e_60l", "v3:32x32"): True,
    }
    capsys.readouterr()


def test_failed_plan_omits_its_rows(planned, monkeypatch, capsys):
    possible = command.plan_experiment

    def plan_experiment(params, topology, options, progress):
        if topology.devices == 512:
            raise UserError("no compiler for [512]")
        return possible(params, topology, options, progress)

    monkeypatch.setattr(command, "plan_experiment", plan_experiment)
    assert run("--rows=weights") == 1
    printed = capsys.readouterr().out
    assert "not planned" in printed
    assert "no compiler for [512]" in printed
    assert len(planned) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows=weigths"], "`rows`: unknown row 'weigths'. Did you mean 'weights'?"),
        (["--topology=v3:8x8"], "topology"),
        (["--partitioner=shard"], "`partitioner=shard` is"),
    ],
)
def test_incompatible_flags_are_rejected(planned, arguments, message):
    with pytest.raises(ValueError) as error:
        run(*arguments)
    assert message in str(error.value)
    assert not planned
