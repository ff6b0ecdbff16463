"""Tests Params: names, paths, copies, text and differences."""

import hypothesis
from absl.testing import parameterized
from hypothesis import strategies

from lingvo_gshard import testing
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.initializers import constant


class Dense(Configurable):
    """A class with Params."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("output_dim", 8, "Size of the output.")
        p.define("name", "dense", "A name.")
        return p


class Stack(Configurable):
    """A class with one child and a list of children."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("head", Dense.params(), "The head.")
        p.define("layers", [Dense.params(), Dense.params().set(output_dim=9)], "The layers.")
        p.define("sizes", (1, 2), "A plain tuple.")
        return p


_names = strategies.from_regex(r"x_[a-z]{1,5}", fullmatch=True)
_values = strategies.one_of(strategies.integers(), strategies.text(max_size=5), strategies.none())


class ParamsTest(testing.TestCase, parameterized.TestCase):
    def test_names_can_be_set_and_read(self):
        p = Dense.params().set(output_dim=16)
        self.assertEqual((p.output_dim, p.name), (16, "dense"))
        self.assertEqual(dict(p.items()), {"output_dim": 16, "name": "dense"})
        self.assertIn("output_dim", p)
        self.assertNotIn("input_dim", p)

    def test_setting_a_value_does_not_change_its_default_or_help(self):
        p = Dense.params().set(output_dim=16).copy()
        self.assertEqual(p.default("output_dim"), 8)
        self.assertEqual(p.help("output_dim"), "Size of the output.")

    @parameterized.named_parameters(
        ("read", lambda p: p.output_dmi),
        ("assigned", lambda p: setattr(p, "output_dmi", 3)),
        ("set", lambda p: p.set(output_dmi=3)),
        ("get", lambda p: p.get("output_dmi")),
        ("set_path", lambda p: p.set_path("output_dmi", 3)),
    )
    def test_an_unknown_name_suggests_the_nearest(self, mistake):
        with self.assertRaisesRegex(
            ValueError, r"Dense has no hyperparameter 'output_dmi'.*'output_dim'"
        ):
            mistake(Dense.params())

    def test_an_unknown_name_on_a_path_raises_with_the_path(self):
        with self.assertRaisesRegex(ValueError, r"'layers\[1\].naem'.*Did you mean 'name'"):
            Stack.params().get("layers[1].naem")

    @parameterized.parameters("layers[2].name", "sizes.x", "head.name.x", "layers[x]", "")
    def test_rejects_paths_through_a_leaf(self, path):
        with self.assertRaises(ValueError):
            Stack.params().get(path)

    @parameterized.parameters("copy", "items", "two words", "1st")
    def test_define_rejects_names_that_cannot_be_attributes(self, name):
        with self.assertRaisesRegex(ValueError, "cannot be the name"):
            Params().define(name, 0, "")

    def test_define_rejects_duplicate_names(self):
        with self.assertRaisesRegex(ValueError, "already defined"):
            Dense.params().define("name", "", "")

    def test_methods_cannot_be_set_as_hyperparameters(self):
        with self.assertRaisesRegex(ValueError, "no hyperparameter 'copy'"):
            Stack.params().get("head.copy")

    def test_set_path_reaches_into_lists(self):
        p = Stack.params()
        p.set_path("layers[1].output_dim", 32)
        p.set_path("head.name", "top")
        self.assertEqual(p.layers[1].output_dim, p.get("layers[1].output_dim"))
        self.assertEqual(p.get("layers[1].output_dim"), 32)
        self.assertEqual(p.head.name, "top")
        self.assertEqual(p.layers[0].output_dim, 8)

    def test_every_leaf_can_be_read_by_its_path(self):
        p = Stack.params()
        leaves = dict(p.leaves())
        self.assertEqual(leaves["layers[1].output_dim"], 9)
        self.assertIs(leaves["head.cls"], Dense)
        self.assertTrue(all(p.get(path) == value for path, value in leaves.items()))

    def test_nodes_include_list_elements(self):
        paths = [path for path, _ in Stack.params().nodes()]
        self.assertEqual(paths, ["", "head", "layers[0]", "layers[1]"])

    def test_copy_is_deep_and_not_frozen(self):
        p = Stack.params().freeze()
        copy = p.copy()
        copy.layers[0].output_dim = 99
        copy.layers.append(Dense.params())
        self.assertEqual(p.layers[0].output_dim, 8)
        self.assertEqual(len(p.layers), 2)

    def test_every_node_of_a_frozen_tree_rejects_changes(self):
        p = Stack.params().freeze()
        for change in (
            lambda: setattr(p, "sizes", ()),
            lambda: setattr(p.layers[0], "name", "x"),
            lambda: p.set_path("head.name", "x"),
            lambda: p.set_path("layers[0]", None),
            lambda: p.define("more", 0, ""),
        ):
            with self.assertRaisesRegex(ValueError, "frozen"):
                change()

    def test_equality_compares_classes_and_values(self):
        self.assertEqual(Stack.params(), Stack.params())
        self.assertNotEqual(Stack.params(), Stack.params().set(sizes=(1, 3)))
        self.assertNotEqual(Params(Dense), Params(Stack))

    def test_text_has_one_line_per_leaf(self):
        text = Stack.params().to_text()
        self.assertIn("layers[1].output_dim : 9\n", text)
        self.assertIn("head.name : 'dense'\n", text)
        self.assertIn(f"head.cls : {Dense.__module__}.Dense\n", text)
        self.assertEqual(text.splitlines(), sorted(text.splitlines()))

    def test_text_of_a_callable(self):
        p = Params()
        p.define("initializer", constant(1.0), "")
        self.assertEqual(p.to_text(), "initializer : Initializer(kind='constant', scale=1.0)\n")

    def test_diff_names_paths_and_both_values(self):
        mine, theirs = Stack.params(), Stack.params()
        theirs.layers[0].output_dim = 3
        theirs.head = None
        self.assertEqual(
            mine.diff(theirs),
            [
                ("head", "(absent)", "None"),
                ("head.cls", f"{Dense.__module__}.Dense", "(absent)"),
                ("head.name", "'dense'", "(absent)"),
                ("head.output_dim", "8", "(absent)"),
                ("layers[0].output_dim", "8", "3"),
            ],
        )

    def test_instantiate_builds_the_class_with_frozen_params(self):
        p = Dense.params()
        dense = p.instantiate()
        p.output_dim = 1
        self.assertIsInstance(dense, Dense)
        self.assertEqual(dense.p.output_dim, 8)
        with self.assertRaisesRegex(ValueError, "frozen"):
            dense.p.output_dim = 2
        with self.assertRaisesRegex(ValueError, "no class"):
            Params().instantiate()

    @hypothesis.settings(deadline=None)
    @hypothesis.given(strategies.dictionaries(_names, _values, max_size=8))
    def test_a_changed_leaf_is_the_only_difference(self, values):
        p = Params()
        for name, value in values.items():
            p.define(name, (value,), "")
        q = p.copy()
        self.assertEqual(p, q)
        self.assertFalse(p.diff(q))
        self.assertEqual(p.to_text(), q.to_text())
        for name in values:
            changed = p.copy().set(**{name: (values[name], 0)})
            self.assertEqual([path for path, *_ in p.diff(changed)], [name])


if __name__ == "__main__":
    testing.main()
