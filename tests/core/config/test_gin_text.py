"""Tests that Params written as gin explain themselves and are read back."""

import pathlib

import pytest

from lingvo_gshard.api.experiments import describe, experiment
from lingvo_gshard.core.config import params_text, registry


@pytest.fixture(scope="module")
def quickstart():
    return experiment("translation.quickstart")


def settings_of(text):
    return [line.partition(" = ")[0] for line in text.splitlines() if line and line[0] != "#"]


@pytest.mark.parametrize("name", ["translation.quickstart", "gshard_paper.moe_128e_12l"])
def test_what_is_written_is_read_back(tmp_path, name):
    changes = ["step.schedule.learning_rate = 0.5", "task.encoder.num_layers = 4"]
    changed = experiment(name, changes)
    file = tmp_path / "changed.gin"
    file.write_text(describe(changed))
    assert experiment(name, gin_files=[file]) == changed != experiment(name)


def test_each_value_stands_below_its_meaning_range_and_default(quickstart):
    text = describe(quickstart, "task.model_dim")
    assert text == (
        "# Size of M. A number of 1 or more. Default of TranslationTask: 0.\ntask.model_dim = 128\n"
    )


def test_a_class_can_be_replaced_and_is_described(quickstart):
    lines = describe(quickstart, "step.optimizer").splitlines()
    assert lines[1] == "step.optimizer = @lingvo_gshard.training.step.adam.Adam"


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("clip_norm", ["step.clip_norm"]),
        ("CLIP", ["step.clip_norm"]),
        ("step.sch*s", ["step.schedule.warmup_steps"]),
    ],
)
def test_patterns_select_paths(quickstart, pattern, expected):
    found = settings_of(describe(quickstart, pattern))
    assert set(expected) <= set(found) and len(found) < 6


def test_every_leaf_is_written_once(quickstart):
    written = settings_of(describe(quickstart))
    leaves = [path for path, _ in quickstart.leaves() if not path.endswith("cls")]
    assert len(written) == len(set(written)) and set(leaves) <= set(written)


def test_a_pattern_that_matches_nothing_suggests_the_nearest(quickstart):
    with pytest.raises(ValueError, match=r"dropuot`: no .* matches. Did you mean 'dropout_rate'\?"):
        describe(quickstart, "dropuot")


@pytest.fixture
def saved(tmp_path) -> tuple[pathlib.Path, object]:
    """Writes the params.txt of a run with changed Params; returns it and the Params."""
    changed = experiment("translation.quickstart", ["task.model_dim = 64", "step.seed = 7"])
    (tmp_path / "params.txt").write_text(changed.to_text())
    return tmp_path / "params.txt", changed


def test_the_params_of_a_run_are_a_gin_file(saved, tmp_path):
    path, changed = saved
    assert experiment(gin_files=[path]) == changed
    assert experiment("translation.quickstart", gin_files=[path]) == changed
    (tmp_path / "more.gin").write_text("step.seed = 8\n")
    # The saved Params are applied first, wherever they stand.
    both = experiment("", ["run.steps = 9"], [tmp_path / "more.gin", path])
    assert (both.task.model_dim, both.step.seed, both.run.steps) == (64, 8, 9)


def test_the_params_of_another_experiment_are_refused(saved):
    with pytest.raises(ValueError, match=r"is of the experiment translation.quickstart, not lang"):
        experiment("language_model.quickstart", gin_files=[saved[0]])
    with pytest.raises(ValueError, match="`experiment` is missing"):
        experiment()


def test_damaged_saved_params_name_the_file_and_line(saved):
    saved[0].write_text(saved[0].read_text() + "step.stepps : 3\n")
    with pytest.raises(ValueError, match=r"params.txt: line \d+: step.stepps: "):
        experiment(gin_files=[saved[0]])


@pytest.mark.parametrize("module", ["my_tasks", "subprocess"])
def test_a_class_of_another_module_is_not_imported(saved, module):
    """Not even one of Python's own, which are imported everywhere."""
    text = saved[0].read_text().replace("task.cls : lingvo_gshard.tasks", f"task.cls : {module}")
    with pytest.raises(ValueError, match=rf"classes of {module}, .* add `import={module}`$"):
        params_text.experiment_from_text(text)


def test_a_class_of_a_module_that_the_user_named_is_imported(saved, tmp_path, monkeypatch):
    (tmp_path / "my_named_tasks.py").write_text("from lingvo_gshard.tasks.translation import *")
    monkeypatch.syspath_prepend(tmp_path)
    registry.import_module("my_named_tasks")
    text = saved[0].read_text()
    own = text.replace("task.cls : lingvo_gshard.tasks.translation", "task.cls : my_named_tasks")
    assert own != text
    assert params_text.experiment_from_text(own).to_text() == text


@pytest.mark.parametrize("setting", ["dropout = 0.1", "task.dropout = 0.1", "encoder.dropout = 0"])
def test_an_unknown_name_is_searched_in_the_whole_tree(setting):
    with pytest.raises(ValueError) as error:
        experiment("translation.quickstart", [setting])
    for name in ("input", "residual", "attention"):
        assert f"task.encoder.{name}_dropout_rate" in str(error.value)


def test_an_unknown_attribute_is_searched_below_the_node(quickstart):
    with pytest.raises(ValueError, match=r"one of .*encoder.input_dropout_rate"):
        _ = quickstart.task.dropout
