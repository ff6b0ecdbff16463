"""Tests gin bindings of Params: values, files, macros, references and error messages."""

import gin
import hypothesis
import pytest
from absl.testing import absltest
from hypothesis import strategies

from lingvo_gshard.core.config.gin_binding import apply_gin
from lingvo_gshard.core.config.params import Configurable
from lingvo_gshard.core.config.registry import Experiment


class Optimizer(Configurable):
    """Base class of the optimizers below."""


class Momentum(Optimizer):
    @classmethod
    def params(cls):
        p = super().params()
        p.define("decay", 0.9, "")
        return p


class Adam(Optimizer):
    @classmethod
    def params(cls):
        p = super().params()
        p.define("beta1", 0.9, "")
        return p


class Mixture(Configurable):
    @classmethod
    def params(cls):
        p = super().params()
        p.define("num_experts", 8, "An int.")
        p.define("capacity_factor", 2.0, "A float.")
        return p


class Encoder(Configurable):
    @classmethod
    def params(cls):
        p = super().params()
        p.define("moe", Mixture.params(), "A node.")
        p.define("layers", [Mixture.params(), Mixture.params()], "A list of nodes.")
        p.define("name", "encoder", "A string.")
        p.define("use_bias", True, "A bool.")
        p.define("languages", ("es", "pt"), "A tuple of strings.")
        p.define("weights", {"es": 1.0}, "A dict.")
        p.define("limit", None, "None by default.")
        p.define("activation", max, "A function.")
        return p


class Trainer(Configurable):
    @classmethod
    def params(cls):
        p = super().params()
        p.define("steps", 10, "")
        p.define("optimizer", Momentum.params(), "")
        return p


HERE = f"@{__name__}"


def _params():
    p = Experiment.params().set(name="test", step=Trainer.params())
    p.task = Encoder.params()
    return p


def _apply(*bindings):
    return apply_gin(_params(), [], bindings)


@pytest.mark.parametrize(
    "path, text, value",
    [
        ("task.moe.num_experts", "32", 32),
        ("task.moe.capacity_factor", "1.25", 1.25),
        ("task.moe.capacity_factor", "1", 1.0),
        ("task.moe.capacity_factor", "-1e-3", -1e-3),
        ("task.name", "'a \"b\"'", 'a "b"'),
        ("task.use_bias", "False", False),
        ("task.languages", "('fr',)", ("fr",)),
        ("task.languages", "['fr', 'de', 'it']", ("fr", "de", "it")),
        ("task.languages", "()", ()),
        ("task.weights", "{'es': 2, 'fr': 0.5}", {"es": 2.0, "fr": 0.5}),
        ("task.limit", "7", 7),
        ("task.limit", "[1, 'a', None]", [1, "a", None]),
        ("task.limit", "None", None),
        ("name", "'mine'", "mine"),
    ],
)
def test_a_binding_sets_one_leaf(path, text, value):
    before = _params()
    after = apply_gin(before, [], [f"{path} = {text}"])
    assert after.get(path) == value and type(after.get(path)) is type(value)
    assert {p for p, *_ in before.diff(after)} <= {path}
    assert before == _params()


def test_list_elements_are_addressed_by_index():
    assert _apply("task.layers_1.num_experts = 4").get("task.layers[1].num_experts") == 4


def test_unambiguous_paths_can_be_abbreviated():
    assert _apply("moe.num_experts = 4").task.moe.num_experts == 4


def test_rejects_ambiguous_paths():
    params = _params()
    params.input = Encoder.params()
    with pytest.raises(ValueError, match="'moe' is ambiguous: input.moe, task.moe"):
        apply_gin(params, [], ["moe.num_experts = 4"])


def test_the_last_binding_wins():
    assert _apply("step.steps = 1", "step.steps = 2").step.steps == 2


def test_macros_are_substituted():
    after = _apply(
        "step.steps = %count",
        "task.languages = [%first, 'de']",
        "count = %other",
        "other = 77",
        "first = 'fr'",
    )
    assert after.step.steps == 77 and after.task.languages == ("fr", "de")


def test_a_value_set_to_none_keeps_the_type_of_its_default():
    params = _params()
    params.task.moe = None
    assert apply_gin(params, [], ["task.limit = 3"]).task.limit == 3
    params.task.languages = None
    with pytest.raises(ValueError, match="expected tuple"):
        apply_gin(params, [], ["task.languages = 3"])


def test_a_default_of_none_can_be_restored():
    params = _params()
    params.task.limit = 5
    assert apply_gin(params, [], ["task.limit = None"]).task.limit is None
    with pytest.raises(ValueError, match="expected int or None, such as 5; got the string 'a'"):
        apply_gin(params, [], ["task.limit = 'a'"])


def test_binding_frozen_params_returns_a_mutable_copy():
    after = apply_gin(_params().freeze(), [], ["step.steps = 3"])
    after.step.steps = 4


@pytest.mark.parametrize(
    "binding, expected",
    [
        ("task.moe.num_experts = 32.0", "expected int, such as 8; got the float 32.0"),
        ("task.moe.num_experts = '32'", "expected int, such as 8; got the string '32'"),
        ("task.moe.num_experts = True", "expected int, such as 8; got the bool True"),
        ("task.moe.num_experts = None", "expected int, such as 8; got the None None"),
        ("task.moe.capacity_factor = 'a'", "expected float, such as 2.0; got the string 'a'"),
        ("task.moe.capacity_factor = True", "expected float, such as 2.0; got the bool True"),
        ("task.use_bias = 1", "expected bool, such as True; got the int 1"),
        ("task.use_bias = 'no'", "expected bool, such as True; got the string 'no'"),
        ("task.name = 3", "expected string, such as 'encoder'; got the int 3"),
        ("task.languages = 'es'", "expected tuple"),
        ("task.languages = ['es', 3]", r"\[1\]: expected string, such as 'es'; got the int 3"),
        ("task.weights = {'es': 'a'}", "value 0: expected float"),
        ("task.activation = 'max'", r"expected class or function \(@package.module.name\)"),
        ("task.moe = 3", "group of hyperparameters, which no int can replace"),
        ("task = 3", "group of hyperparameters"),
        ("task.layers = [1]", r"\[0\]: this is a group of hyperparameters"),
        ("name = 3", "expected string"),
    ],
)
def test_a_wrong_type_raises_with_the_path_and_both_types(binding, expected):
    path = binding.partition(" =")[0]
    with pytest.raises(ValueError, match=f"`settings` .*: {path}: .*{expected}"):
        _apply(binding)


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("task.moe.num_expert", "task.moe.num_experts"),
        ("task.mow.num_experts", "task.moe.num_experts"),
        ("task.layer_0.num_experts", "task.layers_0.num_experts"),
        ("step.stepps", "step.steps"),
        ("tasks.use_bias", "task.use_bias"),
        ("moe.num_expert", "task.moe.num_experts"),
        ("steps", "step.steps"),
        ("nmae", "name"),
        ("step.dekay", "step.optimizer.decay"),
        ("task.mew.x", "moe"),
        ("task.layers_2.num_experts", "task.layers_1.num_experts"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"{name}'.*Did you mean '{nearest}'"):
        _apply(f"{name} = 3")


@pytest.mark.parametrize(
    "binding, expected",
    [
        ("task.name = encoder", 'Write strings in quotes: "encoder"'),
        ("task.name", "expected ':' or '='"),
        ("task.layers[0].num_experts = 3", "Write layers_0"),
        ("task.languages = [1, 2", "EOF"),
        ("task.name = %nobody", "macro %nobody is not defined"),
        ("scope/task.name = 'a'", "scopes"),
        ("import os", "imports are not supported"),
        ("include 'nowhere.gin'", "there is no file 'nowhere.gin'"),
        ("unused = 3", "no value uses the macro 'unused'"),
    ],
)
def test_rejects_invalid_gin(binding, expected):
    with pytest.raises(ValueError, match="`settings`") as error:
        _apply(binding)
    assert expected in str(error.value)


def test_rejects_recursive_macros():
    with pytest.raises(ValueError, match="%one is defined by itself"):
        _apply("one = %two", "two = [%one]", "step.steps = %one")


def test_bindings_override_files(tmp_path):
    file = tmp_path / "a.gin"
    file.write_text(
        "# A comment.\nstep.steps = 5\ntask.moe:\n  num_experts = 64\n  capacity_factor = 1\n"
    )
    after = apply_gin(_params(), [str(file)], ["step.steps = 6"])
    assert after.step.steps == 6
    assert (after.task.moe.num_experts, after.task.moe.capacity_factor) == (64, 1.0)


def test_includes_are_relative_to_the_including_file(tmp_path):
    (tmp_path / "base.gin").write_text("width = 3\nstep.steps = 1\n")
    (tmp_path / "top.gin").write_text(
        "include 'base.gin'\nstep.steps = 2\ntask.moe.num_experts = %width\n"
    )
    after = apply_gin(_params(), [str(tmp_path / "top.gin")], [])
    assert (after.step.steps, after.task.moe.num_experts) == (2, 3)


def test_files_can_be_read_from_a_package(tmp_path, monkeypatch):
    package = tmp_path / "some_gin_package" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "base.gin").write_text("step.steps = 9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert apply_gin(_params(), ["some_gin_package/inner/base.gin"], []).step.steps == 9


def test_rejects_recursive_includes(tmp_path):
    (tmp_path / "a.gin").write_text("include 'b.gin'\n")
    (tmp_path / "b.gin").write_text("\ninclude 'a.gin'\n")
    with pytest.raises(ValueError, match=r"b.gin:2: 'a.gin' includes itself"):
        apply_gin(_params(), [str(tmp_path / "a.gin")], [])


@pytest.mark.parametrize(
    "text, line",
    [
        ("step.steps = 1\nstep.stepz = 2\n", 2),
        ("\n\nstep.steps = 'a'\n", 3),
        ("task.name = x\n", 1),
        ("task.moe:\n  num_experts = 1\n  num_exprts = 2\n", 3),
        ("step.steps = 1\n  = 2\n", 2),
    ],
)
def test_errors_in_a_file_name_the_file_and_line(tmp_path, text, line):
    file = tmp_path / "a.gin"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"{file}:{line}: "):
        apply_gin(_params(), [str(file)], [])


def test_rejects_missing_files_and_files_that_are_not_utf8(tmp_path):
    with pytest.raises(ValueError, match="`gin_files`: there is no file 'nowhere.gin'"):
        apply_gin(_params(), ["nowhere.gin"], [])
    file = tmp_path / "latin.gin"
    file.write_bytes("task.name = 'é'\n".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.gin: not UTF-8"):
        apply_gin(_params(), [str(file)], [])


def test_an_unused_macro_of_a_file_warns(tmp_path):
    file = tmp_path / "a.gin"
    file.write_text("steps = 3\n")
    with absltest.TestCase().assertLogs(level="WARNING") as logs:
        assert apply_gin(_params(), [str(file)], []) == _params()
    assert "no value uses the macro 'steps'" in logs.output[0]
    assert "Did you mean 'step.steps'" in logs.output[0]


def test_a_reference_replaces_the_class_of_a_child():
    after = _apply("step.optimizer.beta1 = 0.5", f"step.optimizer = {HERE}.Adam")
    assert after.step.optimizer == Adam.params().set(beta1=0.5)


def test_a_reference_can_replace_one_list_element():
    params = _params()
    params.task.layers = [Momentum.params(), Momentum.params()]
    after = apply_gin(params, [], [f"task.layers_1 = {HERE}.Adam", "task.layers_1.beta1 = 0"])
    assert after.task.layers == [Momentum.params(), Adam.params().set(beta1=0.0)]
    with pytest.raises(ValueError, match="task.layers_1: this is a group"):
        apply_gin(params, [], ["task.layers_1 = 3"])


def test_references_can_set_lists_functions_and_empty_values():
    after = _apply(
        f"task.layers = [{HERE}.Mixture]",
        "task.layers_0.num_experts = 2",
        "task.activation = @builtins.min",
        f"task.limit = {HERE}.Adam",
    )
    assert [layer.num_experts for layer in after.task.layers] == [2]
    assert after.task.activation is min and after.task.limit == Adam.params()


@pytest.mark.parametrize(
    "path, reference, expected",
    [
        ("step.optimizer", f"{HERE}.Mixture", "Mixture cannot replace Momentum"),
        ("step.optimizer", "@builtins.min", "expected a configurable class"),
        ("step.optimizer", f"{HERE}.Adma", "does not exist. Did you mean 'Adam'"),
        ("step.optimizer", "@Adam", "@Adam names no module"),
        ("step.optimizer", "@no.such.Module", "cannot be imported"),
        ("step.optimizer", f"{HERE}.Adam()", "would call it"),
        ("step.steps", f"{HERE}.Adam", "expected int, such as 10; got the reference"),
        ("task.activation", "@math.pi", "expected class or function"),
    ],
)
def test_rejects_references_of_the_wrong_kind(path, reference, expected):
    with pytest.raises(ValueError, match=f"{path}: .*{expected}"):
        _apply(f"{path} = {reference}")


def test_gins_global_configuration_is_not_changed():
    _apply("step.steps = 1", "task.moe.num_experts = 3")
    assert gin.config_str() == ""
    with pytest.raises(ValueError, match="No configurable matching"):
        gin.bind_parameter("task.moe.num_experts", 3)
    assert _apply() == _params()


_leaves = strategies.fixed_dictionaries(
    {},
    optional={
        "step.steps": strategies.integers(-(2**31) + 1, 2**31 - 1),
        "task.moe.capacity_factor": strategies.floats(allow_nan=False, allow_infinity=False),
        "task.name": strategies.text(strategies.characters(codec="utf-8"), max_size=8),
        "task.use_bias": strategies.booleans(),
        "task.languages": strategies.lists(strategies.text("abc", max_size=3)).map(tuple),
    },
)


@hypothesis.given(_leaves)
def test_python_literals_round_trip(values):
    after = _apply(*(f"{path} = {value!r}" for path, value in values.items()))
    assert {path: after.get(path) for path in values} == values
    assert {path for path, *_ in _params().diff(after)} <= set(values)
