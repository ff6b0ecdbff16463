"""Tests Params: names, paths, copies, text and differences."""

import hypothesis
import pytest
from hypothesis import strategies

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


def test_names_can_be_set_and_read():
    p = Dense.params().set(output_dim=16)
    assert (p.output_dim, p.name) == (16, "dense")
    assert dict(p.items()) == {"output_dim": 16, "name": "dense"}
    assert "output_dim" in p and "input_dim" not in p


def test_setting_a_value_does_not_change_its_default_or_help():
    p = Dense.params().set(output_dim=16).copy()
    assert p.default("output_dim") == 8
    assert p.help("output_dim") == "Size of the output."


@pytest.mark.parametrize(
    "mistake",
    [
        lambda p: p.output_dmi,
        lambda p: setattr(p, "output_dmi", 3),
        lambda p: p.set(output_dmi=3),
        lambda p: p.get("output_dmi"),
        lambda p: p.set_path("output_dmi", 3),
    ],
)
def test_an_unknown_name_suggests_the_nearest(mistake):
    with pytest.raises(ValueError, match=r"Dense has no hyperparameter 'output_dmi'.*'output_dim'"):
        mistake(Dense.params())


def test_an_unknown_name_on_a_path_raises_with_the_path():
    with pytest.raises(ValueError, match=r"'layers\[1\].naem'.*Did you mean 'name'"):
        Stack.params().get("layers[1].naem")


@pytest.mark.parametrize("path", ["layers[2].name", "sizes.x", "head.name.x", "layers[x]", ""])
def test_rejects_paths_through_a_leaf(path):
    with pytest.raises(ValueError):
        Stack.params().get(path)


@pytest.mark.parametrize("name", ["copy", "items", "two words", "1st"])
def test_define_rejects_names_that_cannot_be_attributes(name):
    with pytest.raises(ValueError, match="cannot be the name"):
        Params().define(name, 0, "")


def test_define_rejects_duplicate_names():
    with pytest.raises(ValueError, match="already defined"):
        Dense.params().define("name", "", "")


def test_methods_cannot_be_set_as_hyperparameters():
    with pytest.raises(ValueError, match="no hyperparameter 'copy'"):
        Stack.params().get("head.copy")


def test_set_path_reaches_into_lists():
    p = Stack.params()
    p.set_path("layers[1].output_dim", 32)
    p.set_path("head.name", "top")
    assert p.layers[1].output_dim == p.get("layers[1].output_dim") == 32
    assert p.head.name == "top"
    assert p.layers[0].output_dim == 8


def test_every_leaf_can_be_read_by_its_path():
    p = Stack.params()
    leaves = dict(p.leaves())
    assert leaves["layers[1].output_dim"] == 9
    assert leaves["head.cls"] is Dense
    assert all(p.get(path) == value for path, value in leaves.items())


def test_nodes_include_list_elements():
    paths = [path for path, _ in Stack.params().nodes()]
    assert paths == ["", "head", "layers[0]", "layers[1]"]


def test_copy_is_deep_and_not_frozen():
    p = Stack.params().freeze()
    copy = p.copy()
    copy.layers[0].output_dim = 99
    copy.layers.append(Dense.params())
    assert p.layers[0].output_dim == 8 and len(p.layers) == 2


def test_every_node_of_a_frozen_tree_rejects_changes():
    p = Stack.params().freeze()
    for change in (
        lambda: setattr(p, "sizes", ()),
        lambda: setattr(p.layers[0], "name", "x"),
        lambda: p.set_path("head.name", "x"),
        lambda: p.set_path("layers[0]", None),
        lambda: p.define("more", 0, ""),
    ):
        with pytest.raises(ValueError, match="frozen"):
            change()


def test_equality_compares_classes_and_values():
    assert Stack.params() == Stack.params()
    assert Stack.params() != Stack.params().set(sizes=(1, 3))
    assert Params(Dense) != Params(Stack)


def test_text_has_one_line_per_leaf():
    text = Stack.params().to_text()
    assert "layers[1].output_dim : 9\n" in text
    assert "head.name : 'dense'\n" in text
    assert f"head.cls : {Dense.__module__}.Dense\n" in text
    assert text.splitlines() == sorted(text.splitlines())


def test_text_of_a_callable():
    p = Params()
    p.define("initializer", constant(1.0), "")
    assert p.to_text() == "initializer : Initializer(kind='constant', scale=1.0)\n"


def test_diff_names_paths_and_both_values():
    mine, theirs = Stack.params(), Stack.params()
    theirs.layers[0].output_dim = 3
    theirs.head = None
    assert mine.diff(theirs) == [
        ("head", "(absent)", "None"),
        ("head.cls", f"{Dense.__module__}.Dense", "(absent)"),
        ("head.name", "'dense'", "(absent)"),
        ("head.output_dim", "8", "(absent)"),
        ("layers[0].output_dim", "8", "3"),
    ]


def test_instantiate_builds_the_class_with_frozen_params():
    p = Dense.params()
    dense = p.instantiate()
    p.output_dim = 1
    assert isinstance(dense, Dense) and dense.p.output_dim == 8
    with pytest.raises(ValueError, match="frozen"):
        dense.p.output_dim = 2
    with pytest.raises(ValueError, match="no class"):
        Params().instantiate()


_names = strategies.from_regex(r"x_[a-z]{1,5}", fullmatch=True)
_values = strategies.one_of(strategies.integers(), strategies.text(max_size=5), strategies.none())


@hypothesis.given(strategies.dictionaries(_names, _values, max_size=8))
def test_a_changed_leaf_is_the_only_difference(values):
    p = Params()
    for name, value in values.items():
        p.define(name, (value,), "")
    q = p.copy()
    assert p == q and not p.diff(q) and p.to_text() == q.to_text()
    for name in values:
        changed = p.copy().set(**{name: (values[name], 0)})
        assert [path for path, *_ in p.diff(changed)] == [name]
