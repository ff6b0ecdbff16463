# tests: wings/gin/binding.py, wings/gin/reader.py
"""Tests gin bindings of Params: values, files, macros, references and error messages."""

import pathlib
import sys
from unittest import mock

import gin
import hypothesis
from absl.testing import parameterized
from hypothesis import strategies

from lingvo_gshard import testing
from lingvo_gshard.core.config.params import Configurable
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.wings.gin.binding import apply_gin


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


class BindingTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("task.moe.num_experts", "32", 32),
        ("task.moe.capacity_factor", "1.25", 1.25),
        ("task.moe.capacity_factor", "1", 1.0),
        ("task.moe.capacity_factor", "-1e-3", -1e-3),
        ("task.name", "'a \"b\"'", 'a "b"'),
        ("task.use_bias", "False", False),
        ("task.languages", "('fr',)", ("fr",)),
        ("task.languages", "['fr', 'de', 'it']", ("fr", "de", "it")),
        ("task.languages", "'fr'", ("fr",)),
        ("task.languages", "()", ()),
        ("task.weights", "{'es': 2, 'fr': 0.5}", {"es": 2.0, "fr": 0.5}),
        ("task.limit", "7", 7),
        ("task.limit", "[1, 'a', None]", [1, "a", None]),
        ("task.limit", "None", None),
        ("name", "'mine'", "mine"),
    )
    def test_a_binding_sets_one_leaf(self, path, text, value):
        before = _params()
        after = apply_gin(before, [], [f"{path} = {text}"])
        self.assertEqual(after.get(path), value)
        self.assertIs(type(after.get(path)), type(value))
        self.assertContainsSubset({p for p, *_ in before.diff(after)}, {path})
        self.assertEqual(before, _params())

    def test_list_elements_are_addressed_by_index(self):
        after = _apply("task.layers_1.num_experts = 4")
        self.assertEqual(after.get("task.layers[1].num_experts"), 4)

    def test_unambiguous_paths_can_be_abbreviated(self):
        self.assertEqual(_apply("moe.num_experts = 4").task.moe.num_experts, 4)

    def test_one_word_is_a_path_if_one_hyperparameter_alone_ends_so(self):
        self.assertEqual(_apply("steps = 4").step.steps, 4)
        self.assertEqual(_apply(f"optimizer = {HERE}.Adam").step.optimizer, Adam.params())
        with self.assertRaisesRegex(ValueError, "not the last name of one hyperparameter alone"):
            _apply("num_experts = 4")

    def test_a_word_that_a_value_uses_is_a_macro(self):
        after = _apply("steps = 4", "task.moe.num_experts = %steps")
        self.assertEqual((after.step.steps, after.task.moe.num_experts), (10, 4))

    def test_other_nodes_of_a_name_do_not_make_a_path_ambiguous(self):
        params = _params()
        params.input = Encoder.params().set(moe=Momentum.params())
        self.assertEqual(apply_gin(params, [], ["moe.num_experts = 4"]).task.moe.num_experts, 4)

    def test_rejects_ambiguous_paths(self):
        params = _params()
        params.input = Encoder.params()
        with self.assertRaisesRegex(ValueError, "is ambiguous: input.moe.num_experts, task"):
            apply_gin(params, [], ["moe.num_experts = 4"])

    def test_the_last_binding_wins(self):
        self.assertEqual(_apply("step.steps = 1", "step.steps = 2").step.steps, 2)

    def test_macros_are_substituted(self):
        after = _apply(
            "step.steps = %count",
            "task.languages = [%first, 'de']",
            "count = %other",
            "other = 77",
            "first = 'fr'",
        )
        self.assertEqual(after.step.steps, 77)
        self.assertEqual(after.task.languages, ("fr", "de"))

    def test_a_value_set_to_none_keeps_the_type_of_its_default(self):
        params = _params()
        params.task.moe = None
        self.assertEqual(apply_gin(params, [], ["task.limit = 3"]).task.limit, 3)
        params.task.languages = None
        with self.assertRaisesRegex(ValueError, "expected tuple"):
            apply_gin(params, [], ["task.languages = 3"])

    def test_a_default_of_none_can_be_restored(self):
        params = _params()
        params.task.limit = 5
        self.assertIsNone(apply_gin(params, [], ["task.limit = None"]).task.limit)
        with self.assertRaisesRegex(
            ValueError, "expected int or None, such as 5; got the string 'a'"
        ):
            apply_gin(params, [], ["task.limit = 'a'"])

    def test_binding_frozen_params_returns_a_mutable_copy(self):
        after = apply_gin(_params().freeze(), [], ["step.steps = 3"])
        after.step.steps = 4

    @parameterized.parameters(
        ("task.moe.num_experts = 32.0", "expected int, such as 8; got the float 32.0"),
        ("task.moe.num_experts = '32'", "expected int, such as 8; got the string '32'"),
        ("task.moe.num_experts = True", "expected int, such as 8; got the bool True"),
        ("task.moe.num_experts = None", "expected int, such as 8; got the None None"),
        ("task.moe.capacity_factor = 'a'", "expected float, such as 2.0; got the string 'a'"),
        ("task.moe.capacity_factor = True", "expected float, such as 2.0; got the bool True"),
        ("task.use_bias = 1", "expected bool, such as True; got the int 1"),
        ("task.use_bias = 'no'", "expected bool, such as True; got the string 'no'"),
        ("task.name = 3", "expected string, such as 'encoder'; got the int 3"),
        ("task.languages = 3", "expected tuple"),
        ("task.use_bias = 'es'", "expected bool"),
        ("task.languages = ['es', 3]", r"\[1\]: expected string, such as 'es'; got the int 3"),
        ("task.weights = {'es': 'a'}", "value 0: expected float"),
        ("task.activation = 'max'", r"expected class or function \(@package.module.name\)"),
        ("task.moe = 3", "group of hyperparameters, which no int can replace"),
        ("task = 3", "group of hyperparameters"),
        ("task.layers = [1]", r"\[0\]: this is a group of hyperparameters"),
        ("name = 3", "expected string"),
    )
    def test_a_wrong_type_raises_with_the_path_and_both_types(self, binding, expected):
        path = binding.partition(" =")[0]
        with self.assertRaisesRegex(ValueError, f"`settings` .*: {path}: .*{expected}"):
            _apply(binding)

    @parameterized.parameters(
        ("task.moe.num_expert", "task.moe.num_experts"),
        ("task.mow.num_experts", "task.moe.num_experts"),
        ("task.layer_0.num_experts", "task.layers_0.num_experts"),
        ("step.stepps", "step.steps"),
        ("tasks.use_bias", "task.use_bias"),
        ("moe.num_expert", "task.moe.num_experts"),
        ("nmae", "name"),
        ("step.dekay", "step.optimizer.decay"),
        ("task.mew.x", "moe"),
        ("task.layers_2.num_experts", "task.layers_1.num_experts"),
    )
    def test_an_unknown_name_suggests_the_nearest(self, name, nearest):
        with self.assertRaisesRegex(ValueError, f"{name}'.*Did you mean '{nearest}'"):
            _apply(f"{name} = 3")

    @parameterized.parameters(
        ("task.name = encoder", 'Write strings in quotes: "encoder"'),
        ("task.languages = es.tsv", 'Write strings in quotes: "es.tsv"'),
        ("task.name = ../en-es.gz", 'Write strings in quotes: "../en-es.gz"'),
        ("step.steps = ten", "Failed to parse token 'ten'; expected int, such as 10"),
        ("steps = ten", "Failed to parse token 'ten'; expected int, such as 10"),
        ("task.use_bias = yes", "Failed to parse token 'yes'; expected bool, such as True"),
        ("step.max_steps = 3", "unknown name 'step.max_steps'. Did you mean 'step.steps'?"),
        ("task = a.b.Class", "Write classes and functions with an @: @a.b.Class"),
        ("task.name", "expected ':' or '='"),
        ("task.layers[0].num_experts = 3", "Write layers_0"),
        ("task.languages = [1, 2", "EOF"),
        ("task.name = %nobody", "macro %nobody is not defined"),
        ("scope/task.name = 'a'", "scopes"),
        ("import os", "imports are not supported"),
        ("include 'nowhere.gin'", "there is no file 'nowhere.gin'"),
        ("unused = 3", "no value uses the macro 'unused'"),
    )
    def test_rejects_invalid_gin(self, binding, expected):
        with self.assertRaisesRegex(ValueError, "`settings`") as error:
            _apply(binding)
        self.assertIn(expected, str(error.exception))

    def test_rejects_recursive_macros(self):
        with self.assertRaisesRegex(ValueError, "%one is defined by itself"):
            _apply("one = %two", "two = [%one]", "step.steps = %one")


class GinFilesTest(testing.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.get_temp_dir())

    def test_bindings_override_files(self):
        file = self.folder / "a.gin"
        file.write_text(
            "# A comment.\nstep.steps = 5\ntask.moe:\n  num_experts = 64\n  capacity_factor = 1\n"
        )
        after = apply_gin(_params(), [str(file)], ["step.steps = 6"])
        self.assertEqual(after.step.steps, 6)
        self.assertEqual((after.task.moe.num_experts, after.task.moe.capacity_factor), (64, 1.0))

    def test_includes_are_relative_to_the_including_file(self):
        (self.folder / "base.gin").write_text("width = 3\nstep.steps = 1\n")
        (self.folder / "top.gin").write_text(
            "include 'base.gin'\nstep.steps = 2\ntask.moe.num_experts = %width\n"
        )
        after = apply_gin(_params(), [str(self.folder / "top.gin")], [])
        self.assertEqual((after.step.steps, after.task.moe.num_experts), (2, 3))

    def test_files_can_be_read_from_a_package(self):
        package = self.folder / "some_gin_package" / "inner"
        package.mkdir(parents=True)
        for place in (package, package.parent):
            (place / "__init__.py").write_text("")
        (package / "base.gin").write_text("step.steps = 9\n")
        self.enter_context(mock.patch.object(sys, "path", [str(self.folder), *sys.path]))
        after = apply_gin(_params(), ["some_gin_package/inner/base.gin"], [])
        self.assertEqual(after.step.steps, 9)

    def test_rejects_recursive_includes(self):
        (self.folder / "a.gin").write_text("include 'b.gin'\n")
        (self.folder / "b.gin").write_text("\ninclude 'a.gin'\n")
        with self.assertRaisesRegex(ValueError, r"b.gin:2: 'a.gin' includes itself"):
            apply_gin(_params(), [str(self.folder / "a.gin")], [])

    @parameterized.parameters(
        ("step.steps = 1\nstep.stepz = 2\n", 2),
        ("\n\nstep.steps = 'a'\n", 3),
        ("task.name = x\n", 1),
        ("task.moe:\n  num_experts = 1\n  num_exprts = 2\n", 3),
        ("step.steps = 1\n  = 2\n", 2),
    )
    def test_errors_in_a_file_name_the_file_and_line(self, text, line):
        file = self.folder / "a.gin"
        file.write_text(text)
        with self.assertRaisesRegex(ValueError, rf"{file}:{line}: "):
            apply_gin(_params(), [str(file)], [])

    def test_rejects_missing_files_and_files_that_are_not_utf8(self):
        with self.assertRaisesRegex(ValueError, "`gin_files`: there is no file 'nowhere.gin'"):
            apply_gin(_params(), ["nowhere.gin"], [])
        file = self.folder / "latin.gin"
        file.write_bytes("task.name = 'é'\n".encode("latin-1"))
        with self.assertRaisesRegex(ValueError, "latin.gin: not UTF-8"):
            apply_gin(_params(), [str(file)], [])

    def test_an_unused_macro_of_a_file_warns(self):
        file = self.folder / "a.gin"
        file.write_text("num_layers = 3\n")
        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual(apply_gin(_params(), [str(file)], []), _params())
        self.assertIn("no value uses the macro 'num_layers'", logs.output[0])


class ReferencesTest(testing.TestCase, parameterized.TestCase):
    def test_a_reference_replaces_the_class_of_a_child(self):
        after = _apply("step.optimizer.beta1 = 0.5", f"step.optimizer = {HERE}.Adam")
        self.assertEqual(after.step.optimizer, Adam.params().set(beta1=0.5))

    def test_a_reference_can_replace_one_list_element(self):
        params = _params()
        params.task.layers = [Momentum.params(), Momentum.params()]
        after = apply_gin(params, [], [f"task.layers_1 = {HERE}.Adam", "task.layers_1.beta1 = 0"])
        self.assertEqual(after.task.layers, [Momentum.params(), Adam.params().set(beta1=0.0)])
        with self.assertRaisesRegex(ValueError, "task.layers_1: this is a group"):
            apply_gin(params, [], ["task.layers_1 = 3"])

    def test_references_can_set_lists_functions_and_empty_values(self):
        after = _apply(
            f"task.layers = [{HERE}.Mixture]",
            "task.layers_0.num_experts = 2",
            "task.activation = @builtins.min",
            f"task.limit = {HERE}.Adam",
        )
        self.assertEqual([layer.num_experts for layer in after.task.layers], [2])
        self.assertIs(after.task.activation, min)
        self.assertEqual(after.task.limit, Adam.params())

    @parameterized.parameters(
        ("step.optimizer", f"{HERE}.Mixture", "Mixture cannot replace Momentum"),
        ("step.optimizer", "@builtins.min", "expected a configurable class"),
        ("step.optimizer", f"{HERE}.Adma", "does not exist. Did you mean 'Adam'"),
        ("step.optimizer", "@Adam", "@Adam names no module"),
        ("step.optimizer", "@no.such.Module", "cannot be imported"),
        ("step.optimizer", f"{HERE}.Adam()", "would call it"),
        ("step.steps", f"{HERE}.Adam", "expected int, such as 10; got the reference"),
        ("task.activation", "@math.pi", "expected class or function"),
        ("task.limit", "@math.pi", "is a float; expected a class or function"),
        ("task.limit", "@os.path", "is a module; expected a class or function"),
    )
    def test_rejects_references_of_the_wrong_kind(self, path, reference, expected):
        with self.assertRaisesRegex(ValueError, f"{path}: .*{expected}"):
            _apply(f"{path} = {reference}")


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


class RoundTripTest(testing.TestCase):
    def test_gins_global_configuration_is_not_changed(self):
        _apply("step.steps = 1", "task.moe.num_experts = 3")
        self.assertEqual(gin.config_str(), "")
        with self.assertRaisesRegex(ValueError, "No configurable matching"):
            gin.bind_parameter("task.moe.num_experts", 3)
        self.assertEqual(_apply(), _params())

    @hypothesis.settings(deadline=None)
    @hypothesis.given(_leaves)
    def test_python_literals_round_trip(self, values):
        after = _apply(*(f"{path} = {value!r}" for path, value in values.items()))
        self.assertEqual({path: after.get(path) for path in values}, values)
        self.assertContainsSubset({path for path, *_ in _params().diff(after)}, set(values))


if __name__ == "__main__":
    testing.main()
