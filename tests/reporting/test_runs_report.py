# tests: wings/reporting/runs_report.py, wings/reporting/run.py
"""Checks what a report says of runs, and the sentences for directories that it cannot report on."""

import shutil

import msgspec
import pytest

from lingvo_gshard.wings.reporting import runs_report
from lingvo_gshard.wings.reporting.curves import RecordedCompilation, recompilations
from lingvo_gshard.wings.reporting.runs_report import read_report
from tests.reporting import example_runs


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Two runs that differ in their seed and length."""
    folder = tmp_path_factory.mktemp("runs")
    first = example_runs.write_run(folder / "a" / "run")
    return read_report([first, example_runs.write_run(folder / "b" / "run", 200, seed=2)])


def test_runs_are_named_by_as_few_parts_as_tell_them_apart(both):
    assert [run.label for run in both.runs] == ["a/run", "b/run"]
    assert runs_report.labels(["/x/one", "/x/two"]) == ["one", "two"]
    assert runs_report.labels(["/x/run"]) == ["run"]


def test_hyperparameters_that_differ_are_listed(both):
    found = {row.path: row.values for row in both.differences}
    assert found == {"step.seed": ["1", "2"], "run.steps": ["400", "200"]}
    rows = runs_report.differences([{"a": "1"}, {"a": "1", "b": "2"}])
    assert rows == [runs_report.ParamsDifference("b", [None, "2"])]


def test_files_of_the_run_are_read(both):
    run = both.runs[0]
    assert (run.experiment, run.steps, run.history.last_step) == ("test.example", 400, 400)
    assert [launch.step for launch in run.launches] == [0, 200]
    assert run.evaluations[0].scores["languages"]["es"]["translated"]["chrf"] == 52.5
    assert run.mesh.axes == [("data", 2), ("model", 2)]
    assert run.mesh.splits[4] == [["data"], [], ["model"]]


def test_training_steps_that_were_compiled_again_are_found_with_their_cause(both):
    (found,) = both.runs[0].recompilations
    assert (found.step, found.seconds) == (120, 3.5)
    assert found.changes == ["ids: int32[8,16] became int32[8,24]"]


def test_the_first_compilation_of_a_run_without_launches_is_no_recompilation():
    programs = [RecordedCompilation(step, "train", {}, 1.0, 0.0, 1.0) for step in (5, 5, 9)]
    assert [found.step for found in recompilations(programs, [])] == [9]


def test_bytes_are_summed_by_layer(both):
    layers = {row.layer: row for row in both.layers[0]}
    assert list(layers)[:4] == [
        "encoder.embedding",
        "encoder.layers[0]",
        "encoder.layers[1]",
        "encoder.final_norm",
    ]
    experts = layers["encoder.layers[1]"]
    assert (experts.weights, experts.moments, experts.bytes) == (512, 512, 4096)
    assert (
        runs_report.layer_of("decoder.layers.body[1].moe.w/first_moment")
        == "decoder.layers.body[1]"
    )
    assert runs_report.layer_of("table") == "table"


def test_routers_are_pictures_of_shares_over_an_even_share(both):
    first, second = both.runs[0].routers
    assert (first.layer, second.layer) == example_runs.LAYERS
    assert first.steps == list(range(50, 401, 50))
    assert [row[-1] for row in first.load] == [2.8, 0.8, 0.4, 0.0]
    assert first.dead == [1] * 8
    assert first.balance_distance[-1] == pytest.approx(0.2)
    assert [(row.name, row.load) for row in first.by_language] == [
        ("es", [4, 0, 0, 0]),
        ("de", [0, 3, 1, 0]),
    ]


def test_a_run_of_an_earlier_version_has_metrics_only(tmp_path):
    run = example_runs.write_run(tmp_path / "run", 20)
    shutil.rmtree(run / "profile")
    for file in run.iterdir():
        if file.name not in ("params.txt", "metrics.jsonl"):
            file.unlink()
    (found,) = read_report([run]).runs
    assert (found.launches, found.programs, found.evaluations) == ([], [], [])
    assert (found.sharding, found.mesh, found.routers) == (None, None, [])
    assert (found.roll_backs, found.profiles) == ([], [])


def test_profiles_stand_beside_the_plan(both):
    (found,) = both.runs[0].profiles
    assert found.path == "profile/plugins/profile/steps_20-23"
    assert (found.profile.first_step, found.comparison.predicted) == (20, 0.12)
    assert both.runs[0].roll_backs[0].last_step == 300


def test_damaged_profiles_are_left_out(tmp_path):
    run = example_runs.write_run(tmp_path / "run", 20)
    (folder,) = run.glob("profile/plugins/profile/*")
    (folder / "comparison.json").write_bytes(b"{")
    assert read_report([run]).runs[0].profiles[0].comparison is None
    (folder / "profile.json").write_bytes(b"[1]")
    assert read_report([run]).runs[0].profiles == []


@pytest.mark.parametrize("count", [1, 100])
def test_layers_with_very_many_experts_are_drawn_in_groups(tmp_path, count):
    run = example_runs.write_run(tmp_path / "run", 20)
    record = example_runs.routers(50, "moe")
    rows = [
        {"step": step, "choices": [1] * 256, "kept": [1] * 256, "by_language": {}, "by_class": {}}
        for step in range(1, count + 1)
    ]
    lines = [msgspec.json.encode(msgspec.structs.replace(record, **row)) + b"\n" for row in rows]
    (run / "routers.jsonl").write_bytes(b"".join(lines))
    (picture,) = read_report([run]).runs[0].routers
    assert (picture.experts, picture.experts_in_row) == (256, 4)
    assert len(picture.load) == 64 and set(map(len, picture.load)) == {min(count, 60)}
    assert picture.steps[-1] == count and picture.load[0][0] == 1


def test_directories_without_a_run_are_named(tmp_path):
    run = example_runs.write_run(tmp_path / "quickstart", 20)

    def problem(*logdirs):
        with pytest.raises(ValueError) as raised:
            read_report([str(logdir) for logdir in logdirs])
        return str(raised.value).replace(str(tmp_path), "T")

    assert problem(tmp_path / "quickstrat") == (
        "`logdir=T/quickstrat`: there is no such directory. Did you mean 'quickstart'? Train one "
        "first: gshard-train --experiment=NAME --logdir=T/quickstrat"
    )
    assert problem(tmp_path) == (
        "`logdir=T`: it is no run, but a directory with runs: T/quickstart. Name one or several "
        "of them"
    )
    (tmp_path / "empty").mkdir()
    assert problem(tmp_path / "empty").startswith("`logdir=T/empty`: there is no run in it (no")
    assert problem(run / "params.txt") == (
        "`logdir=T/quickstart/params.txt` is a file; the directory of a run was expected"
    )
    assert problem(run, run) == "`logdir=T/quickstart` is named twice"
    assert problem() == "`logdir` is missing: the directory that gshard-train wrote"
    assert problem(*(run / str(i) for i in range(9))) == (
        "`logdir` names 9 runs; 8 at most can be compared"
    )
    (run / "metrics.jsonl").write_bytes(b"")
    assert problem(run) == (
        "`logdir=T/quickstart`: the run of test.example has no metrics yet: metrics.jsonl has no "
        "row"
    )
