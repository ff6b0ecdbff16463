# tests: api/experiments.py, wings/gin/binding.py, core/config/params_text.py
"""Tests that Params written as gin explain themselves and are read back."""

import functools
import pathlib
import sys
from unittest import mock

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.api.experiments import describe, experiment
from lingvo_gshard.core.config import params_text, registry


@functools.cache
def quickstart():
    return experiment("translation.quickstart")


def settings_of(text):
    return [line.partition(" = ")[0] for line in text.splitlines() if line and line[0] != "#"]


class DescribeTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters("translation.quickstart", "gshard_paper.moe_128e_12l")
    def test_what_is_written_is_read_back(self, name):
        changes = ["step.schedule.learning_rate = 0.5", "task.encoder.num_layers = 4"]
        changed = experiment(name, changes)
        file = pathlib.Path(self.get_temp_dir()) / "changed.gin"
        file.write_text(describe(changed))
        self.assertEqual(experiment(name, gin_files=[file]), changed)
        self.assertNotEqual(changed, experiment(name))

    def test_each_value_stands_below_its_meaning_range_and_default(self):
        text = describe(quickstart(), "task.model_dim")
        self.assertEqual(
            text,
            "# Size of M. A number of 1 or more. Default of TranslationTask: 0.\n"
            "task.model_dim = 128\n",
        )

    def test_a_class_can_be_replaced_and_is_described(self):
        lines = describe(quickstart(), "step.optimizer").splitlines()
        self.assertEqual(lines[1], "step.optimizer = @lingvo_gshard.wings.optimizers.muon.Muon")

    @parameterized.parameters(
        ("clip_norm", ["step.clip_norm"]),
        ("CLIP", ["step.clip_norm"]),
        ("step.sch*s", ["step.schedule.warmup_steps"]),
    )
    def test_patterns_select_paths(self, pattern, expected):
        found = settings_of(describe(quickstart(), pattern))
        self.assertContainsSubset(expected, found)
        self.assertLess(len(found), 6)

    def test_every_leaf_is_written_once(self):
        written = settings_of(describe(quickstart()))
        leaves = [path for path, _ in quickstart().leaves() if not path.endswith("cls")]
        self.assertEqual(len(written), len(set(written)))
        self.assertContainsSubset(leaves, written)

    def test_a_pattern_that_matches_nothing_suggests_the_nearest(self):
        with self.assertRaisesRegex(
            ValueError, r"dropuot`: no .* matches. Did you mean 'dropout_rate'\?"
        ):
            describe(quickstart(), "dropuot")


class SavedParamsTest(testing.TestCase, parameterized.TestCase):
    """Tests reading the params.txt of a run with changed Params."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.get_temp_dir())
        self.changed = experiment(
            "translation.quickstart", ["task.model_dim = 64", "step.seed = 7"]
        )
        self.saved = self.folder / "params.txt"
        self.saved.write_text(self.changed.to_text())

    def test_the_params_of_a_run_are_a_gin_file(self):
        self.assertEqual(experiment(gin_files=[self.saved]), self.changed)
        self.assertEqual(experiment("translation.quickstart", gin_files=[self.saved]), self.changed)
        (self.folder / "more.gin").write_text("step.seed = 8\n")
        # The saved Params are applied first, wherever they stand.
        both = experiment("", ["run.steps = 9"], [self.folder / "more.gin", self.saved])
        self.assertEqual((both.task.model_dim, both.step.seed, both.run.steps), (64, 8, 9))

    def test_the_params_of_another_experiment_are_refused(self):
        with self.assertRaisesRegex(
            ValueError, r"is of the experiment translation.quickstart, not lang"
        ):
            experiment("language_model.quickstart", gin_files=[self.saved])
        with self.assertRaisesRegex(ValueError, "`experiment` is missing"):
            experiment()

    def test_damaged_saved_params_name_the_file_and_line(self):
        self.saved.write_text(self.saved.read_text() + "step.stepps : 3\n")
        with self.assertRaisesRegex(ValueError, r"params.txt: line \d+: step.stepps: "):
            experiment(gin_files=[self.saved])

    @parameterized.parameters("my_tasks", "subprocess")
    def test_a_class_of_another_module_is_not_imported(self, module):
        """Refuses even Python's own modules, which are imported everywhere."""
        text = self.changed.to_text()
        text = text.replace("task.cls : lingvo_gshard.tasks", f"task.cls : {module}")
        with self.assertRaisesRegex(ValueError, rf"classes of {module}, .* add `import={module}`$"):
            params_text.experiment_from_text(text)

    def test_a_class_of_a_module_that_the_user_named_is_imported(self):
        (self.folder / "my_named_tasks.py").write_text(
            "from lingvo_gshard.tasks import translation\n"
            "class TranslationTask(translation.TranslationTask):\n    pass\n"
        )
        self.enter_context(mock.patch.object(sys, "path", [str(self.folder), *sys.path]))
        registry.import_module("my_named_tasks")
        text = self.saved.read_text()
        own = text.replace(
            "task.cls : lingvo_gshard.tasks.translation", "task.cls : my_named_tasks"
        )
        self.assertNotEqual(own, text)
        self.assertEqual(params_text.experiment_from_text(own).to_text(), own)


class UnknownNamesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters("dropout = 0.1", "task.dropout = 0.1", "encoder.dropout = 0")
    def test_an_unknown_name_is_searched_in_the_whole_tree(self, setting):
        with self.assertRaises(ValueError) as error:
            experiment("translation.quickstart", [setting])
        for name in ("input", "residual", "attention"):
            self.assertIn(f"task.encoder.{name}_dropout_rate", str(error.exception))

    def test_an_unknown_attribute_is_searched_below_the_node(self):
        with self.assertRaisesRegex(ValueError, r"one of .*encoder.input_dropout_rate"):
            _ = quickstart().task.dropout


if __name__ == "__main__":
    testing.main()
