# tests: __init__.py, keras/__init__.py, api/experiments.py, api/importing.py, api/options.py
# tests: api/partitioning.py, api/planning.py, api/preparation.py, api/run.py, api/training.py
# tests: wings/functions/partition.py, wings/preparation/pipeline.py, wings/preparation/sources.py
# tests: wings/cluster/member.py, wings/export/decoder.py, wings/inference/options.py
"""Runs the example in the docstring of each public name, with small experiments."""

import doctest
import inspect
import os

import numpy as np
import pytest
import rich.console

import lingvo_gshard as gshard
from tests.data import corpora
from tests.open_models import published

# Examples that train, load a trained run or compile a training step.
SLOW = ("keras", "load", "plan", "plan_generation", "report", "Run", "train", "verify")
_LEAST_LINES, _MOST_LINES = 2, 6
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_TRANSLATION = "translation.quickstart"
_SMALL = {
    _TRANSLATION: (
        'input.languages = ("gl",)',
        "input.vocabulary.size = 1000",
        "input.batch_rows = 16",
        "task.model_dim = 32",
        "task.encoder.num_layers = 1",
        "task.encoder.moe_every = 1",
        "task.encoder.moe.group_size = 64",
        "task.decoder.num_layers = 1",
        "task.decoder.moe_every = 0",
    ),
    "language_model.quickstart": ("task.model_dim = 16", "task.decoder.num_layers = 1"),
}


def _example(name):
    """Returns the example in the docstring of a public name."""
    text = inspect.cleandoc(getattr(gshard, name).__doc__)
    return doctest.DocTestParser().get_doctest(text, {}, name, name, 0)


@pytest.mark.parametrize("name", gshard.__all__)
def test_each_public_name_has_a_short_example(name):
    lines = [line for each in _example(name).examples for line in each.source.splitlines()]
    shown = [line for each in _example(name).examples for line in each.want.splitlines()]
    assert _LEAST_LINES <= len(lines) + len(shown) <= _MOST_LINES
    # A run is opened by `load`.
    assert f"gshard.{'load' if name == 'Run' else name}" in "\n".join(lines)


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Returns what an example may use, in a folder with the files that examples read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpora.write(tmp_path / "pairs.tsv", 200)
    published.write(tmp_path / "models" / "llama")
    settings = gshard.preparation_params(["vocabulary.size = 300"])
    return {
        "gshard": gshard,
        "np": np,
        "rich": rich,
        "params": gshard.experiment(_TRANSLATION),
        "options": gshard.PrepareOptions(settings, workers=1),
    }


@pytest.fixture
def small(names, monkeypatch):
    """Returns the same, with small experiments in place of the package's."""
    whole = gshard.experiment
    monkeypatch.setattr(gshard, "experiment", lambda name: whole(name, _SMALL[name]))
    return {**names, "params": gshard.experiment(_TRANSLATION)}


@pytest.fixture
def trained(small):
    """Returns the same, with the run of `train`'s example."""
    os.makedirs("runs")
    quiet = rich.console.Console(quiet=True)
    gshard.train(small["params"], "runs/small", steps=10, console=quiet)
    return small


def _run(name, names):
    test = _example(name)
    test.globs.update(names)
    report: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=_FLAGS).run(test, out=report.append)
    if report:
        pytest.fail("".join(report))


@pytest.mark.parametrize("name", [name for name in gshard.__all__ if name not in SLOW])
def test_examples_that_take_seconds(name, names):
    _run(name, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "plan_generation", "train", "verify"])
def test_examples_that_compile(name, small):
    _run(name, small)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load", "report", "Run"])
def test_examples_of_a_trained_run(name, trained):
    _run(name, trained)


@pytest.mark.slow
def test_the_example_of_keras(names):
    import keras

    _run("keras", {**names, "keras": keras})


def test_a_wrong_example_fails(monkeypatch):
    monkeypatch.setattr(gshard.experiments, "__doc__", "Text.\n\n>>> 1 + 1\n3")
    with pytest.raises(pytest.fail.Exception, match="Expected:\n    3\nGot:\n    2"):
        _run("experiments", {})
