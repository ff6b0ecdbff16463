# tests: wings/planning/programs/planned.py, wings/planning/memory.py
"""Classifies arguments as Flax, Optax, Keras, Equinox and Haiku name them."""

import pytest

from lingvo_gshard.runtime.program.array import Array
from lingvo_gshard.wings.planning.memory import INPUTS, MOMENTS, WEIGHTS
from lingvo_gshard.wings.planning.programs.planned import MemoryPatterns, layer_of, memory_classes


def arrays(*paths):
    return [Array(path, (2,), "float32", ((),)) for path in paths]


@pytest.mark.parametrize(
    ("path", "kind", "layer"),
    [
        ("state.params.Dense_0.kernel", WEIGHTS, "Dense_0"),
        ("state.opt_state[0].mu.Dense_0.kernel", MOMENTS, "Dense_0"),
        ("state.opt_state[0].count", MOMENTS, "0"),
        ("params.attention.v.kernel", WEIGHTS, "attention/v"),
        ("params.mlp/~/linear.w", WEIGHTS, "mlp/~/linear"),
        ("model.layers[0].weight", WEIGHTS, "layers/0"),
        ("trainable_variables[3]", WEIGHTS, ""),
        ("optimizer_variables[3]", MOMENTS, ""),
        ("batch.tokens", INPUTS, "batch"),
        ("state.step", INPUTS, "state"),
    ],
)
def test_names_tell_classes_and_layers(path, kind, layer):
    assert memory_classes(arrays(path), (), MemoryPatterns())[0] == (kind,)
    assert layer_of(path) == layer


def test_patterns_replace_names():
    inputs = arrays("params.w", "cache.w", "slots.w", "opt_state.w")
    classes, note = memory_classes(inputs, (), MemoryPatterns(weights="cache", moments="slots"))
    assert classes == (INPUTS, WEIGHTS, MOMENTS, INPUTS)
    assert (
        "1 of weights (by `weights=cache`), 1 of moments (by `moments=slots`), 2 of inputs" in note
    )


def test_donated_arguments_are_weights_if_no_name_tells():
    inputs = [*arrays("a", "b", "opt_state.c"), Array("count", (), "int32", ())]
    classes, note = memory_classes(inputs, (0, 2, 3), MemoryPatterns())
    assert classes == (WEIGHTS, INPUTS, MOMENTS, INPUTS)
    assert "1 of weights (because their memory is donated)" in note
