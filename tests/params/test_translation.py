# tests: params/translation.py, wings/giants/experiments.py
"""Tests the translation experiments: their layers, sizes and documented commands."""

import re
import shlex

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params_text import experiment_from_text
from lingvo_gshard.data.sources import tsv
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.tools.flags.plain_flags import as_settings
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.preparation.formats import gettext, moses

NAMES = [name for name in registry.names() if name.startswith("translation.")]
BUILT_IN = [name for name in NAMES if name != "translation.from_files"]


def build(params):
    """Returns (input, task, trainer) with fixed vocabulary sizes, without reading text."""
    task = params.task.copy().set(source_vocabulary_size=50, target_vocabulary_size=50)
    task = task.instantiate()
    return params.input.instantiate(), task, params.step.instantiate(task, params.run.steps)


def commands(name):
    """Returns the gshard-train commands of an experiment's docstring, as lists of arguments."""
    text = registry.describe(name).replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^ +(gshard-train .*)$", text, re.MULTILINE)]


def test_all_experiments_are_registered():
    assert NAMES == [
        "translation.from_files",
        "translation.hundred_languages",
        "translation.large",
        "translation.quickstart",
        "translation.quickstart_dense",
    ]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_experiment_can_be_built(name):
    input_, task, trainer = build(registry.get(name))
    assert task.variable_specs().flatten_items()
    assert trainer.state_specs().moments.flatten_items()
    assert set(input_.batch_specs(input_.p)) >= {"source_ids", "target_labels"}


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_show_runnable_commands(name):
    text = registry.describe(name)
    for word in ("Purpose:", "Time:", "Result:"):
        assert word in text
    assert commands(name)
    for command in commands(name):
        assert f"--experiment={name}" in command
        assert any(argument.startswith("--logdir=runs/") for argument in command)


@pytest.mark.parametrize("name", NAMES)
def test_params_round_trip_through_text(name):
    params = registry.get(name)
    assert not params.diff(experiment_from_text(params.to_text()))


@pytest.mark.parametrize("name", NAMES)
def test_each_call_returns_new_params(name):
    registry.get(name).set_path("task.encoder.moe.hidden_dim", 12345)
    assert registry.get(name).task.encoder.moe.hidden_dim != 12345
    assert registry.get(name).task.decoder.moe.hidden_dim != 12345


def test_docstrings_show_how_to_set_the_files():
    readers = []
    for command in commands("translation.from_files"):
        flags = [flag for flag in as_settings(command) if flag.startswith("--gin_param=")]
        settings = [flag.removeprefix("--gin_param=") for flag in flags]
        params = apply_gin(registry.get("translation.from_files"), [], settings)
        build(params)
        readers.append(params.input.corpus.cls)
    assert readers == [tsv.TsvReader, moses.MosesReader, gettext.GettextReader]


def test_missing_files_raise_with_the_option():
    with pytest.raises(ValueError, match="input.corpus.train"):
        build(registry.get("translation.from_files"))


def test_the_dense_model_has_as_many_active_parameters():
    sparse, dense = (
        registry.get("translation.quickstart"),
        registry.get("translation.quickstart_dense"),
    )
    assert {path.split(".")[2] for path, _, _ in sparse.diff(dense) if path != "name"} == {"moe"}
    (_, sparse, _), (_, dense, _) = build(sparse), build(dense)
    assert active_weights(sparse) == active_weights(dense)
    assert isinstance(dense.encoder.layers[1].feed_forward, FeedForward)


def active_weights(task):
    """Returns the active weights of the mixtures (two experts of eight), or of the dense layers."""
    total = 0
    for path, spec in task.variable_specs().flatten_items():
        if "layers[1].feed_forward" in path and spec.layout.strip("E") in ("MH", "HM"):
            sizes = dict(zip(spec.layout, spec.shape, strict=True))
            total += sizes["M"] * sizes["H"] * (2 if "E" in sizes else 1)
    return total


def test_the_quickstart_learns_ten_languages():
    params = registry.get("translation.quickstart")
    assert len(set(params.input.languages)) == 10
    for stack in (params.task.encoder, params.task.decoder):
        assert stack.moe.router.evaluation_capacity_factor == stack.moe.num_experts
