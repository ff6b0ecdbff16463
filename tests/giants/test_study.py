# tests: wings/giants/experiments.py
"""Tests the experiments of the study: equal work per token, and more weights with more experts."""

import math

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.training.experiments import make_trainer
from lingvo_gshard.wings.facts.parameters import active_parameters

EXPERTS = (8, 32, 128)
LAYERS, TEXT_LAYERS, M, H = 2, 4, 64, 256


@pytest.fixture(scope="module")
def tasks():
    counts = [f"experts_{count}" for count in EXPERTS]
    names = ("dense", *counts, "bilingual", "text_dense", *(f"text_{name}" for name in counts))
    return {name: make_trainer(registry.get(f"study.{name}")).task for name in names}


def parameters(task):
    return sum(math.prod(spec.shape) for spec in task.variable_specs().flatten())


def test_a_token_uses_as_many_weights_in_each_model(tasks):
    active = {name: active_parameters(task) for name, task in tasks.items()}
    for is_text in (False, True):
        same = {count for name, count in active.items() if name.startswith("text_") == is_text}
        assert len(same) == 1, active


@pytest.mark.parametrize("experts", EXPERTS)
def test_experts_are_the_only_difference(tasks, experts):
    """Two experts of a token are as large as the dense layer, so E experts have E / 2 of it."""
    for prefix, layers in (("", LAYERS), ("text_", TEXT_LAYERS)):
        dense, sparse = (tasks[f"{prefix}{name}"] for name in ("dense", f"experts_{experts}"))
        assert parameters(sparse) - parameters(dense) == layers * (experts - 2) * 2 * M * H


def test_data_batches_and_schedule_are_the_same():
    for prefix in ("study.", "study.text_"):
        dense = registry.get(f"{prefix}dense")
        for experts in EXPERTS:
            sparse = registry.get(f"{prefix}experts_{experts}")
            assert sparse.input.to_text() == dense.input.to_text()
            assert sparse.step.to_text() == dense.step.to_text()
            assert sparse.run.to_text() == dense.run.to_text()
