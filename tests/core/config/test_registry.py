"""Tests the registry of experiments."""

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.registry import Experiment


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_experiments", {})


def _quickstart():
    """Learns in minutes.

    Expected: something.
    """
    return Experiment.params()


def test_experiments_are_looked_up_by_name():
    assert registry.register("translation.quickstart")(_quickstart) is _quickstart
    assert registry.get("translation.quickstart").name == "translation.quickstart"
    assert registry.names() == ("translation.quickstart",)
    assert registry.describe("translation.quickstart").startswith("Learns in minutes.\n\nExpected")


def test_each_call_returns_new_params():
    registry.register("a.b")(_quickstart)
    registry.get("a.b").name = "changed"
    assert registry.get("a.b").name == "a.b"


@pytest.mark.parametrize("look_up", [registry.get, registry.describe])
def test_an_unknown_experiment_suggests_the_nearest(look_up):
    registry.register("translation.quickstart")(_quickstart)
    with pytest.raises(ValueError, match="'translation.quikstart'.*'translation.quickstart'"):
        look_up("translation.quikstart")


def test_rejects_duplicate_names():
    registry.register("a.b")(_quickstart)
    with pytest.raises(ValueError, match="already registered"):
        registry.register("a.b")(_quickstart)


@pytest.mark.parametrize("name", ["", "a b", "a..b", "a/b"])
def test_rejects_names_that_are_not_identifiers(name):
    with pytest.raises(ValueError, match="cannot name an experiment"):
        registry.register(name)


def test_experiments_require_a_docstring():
    with pytest.raises(ValueError, match="docstring"):
        registry.register("a.b")(lambda: Experiment.params())
