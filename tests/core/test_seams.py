"""Tests places where features take part."""

import importlib

import pytest

from lingvo_gshard import features
from lingvo_gshard.core.seams import Seam


def test_features_take_part_in_the_order_of_registration():
    seam: Seam[int] = Seam("test")
    for name, value in (("b", 2), ("a", 1)):
        seam.register(name)(value)
    assert list(seam) == [2, 1]
    assert seam.items() == [("b", 2), ("a", 1)]
    assert "a" in seam and "c" not in seam
    assert seam["a"] == 1


def test_names_are_used_once():
    seam: Seam[int] = Seam("test")
    seam.register("a")(1)
    with pytest.raises(ValueError, match="'test' already has a feature 'a'"):
        seam.register("a")(2)


def test_unknown_names_suggest_the_nearest():
    seam: Seam[int] = Seam("test")
    seam.register("rounding")(1)
    with pytest.raises(KeyError, match="Did you mean 'rounding'"):
        seam["rouding"]


def test_modules_are_imported_at_the_first_use(monkeypatch, tmp_path):
    (tmp_path / "my_feature.py").write_text(
        "import seam_of_this_test as s\ns.SEAM.register('x')(7)"
    )
    (tmp_path / "seam_of_this_test.py").write_text(
        "from lingvo_gshard.core.seams import Seam\nSEAM = Seam('mine')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(features.MODULES, "mine", ("my_feature",))
    seam = importlib.import_module("seam_of_this_test").SEAM
    assert seam["x"] == 7


def test_the_packages_own_features_exist():
    for modules in features.MODULES.values():
        for module in modules:
            importlib.import_module(module)
