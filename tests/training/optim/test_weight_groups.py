# tests: training/step/optimizer.py, sharding/weight_patterns.py
"""Tests learning-rate factors by path, frozen weights, and patterns that match nothing."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import weight_patterns
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.optimizers.lion import Lion
from lingvo_gshard.wings.optimizers.momentum import Momentum
from lingvo_gshard.wings.optimizers.muon import Muon
from tests import tiny
from tests.training.optim import one_weight


def make_trainer(optimizer):
    params = tiny.experiment_params()
    params.step.set(optimizer=optimizer)
    return params.step.instantiate(params.task.instantiate(), params.run.steps)


def descent(factors):
    return Momentum.params().set(beta=0.0, learning_rate_factors=factors)


def changes(trainer):
    """Returns how far each weight moved in a step, and the metrics."""
    state = trainer.init_state()
    new, metrics = trainer.train_step(state, tiny.make_batch(1, 0))
    weights = zip(state.theta.flatten_items(), new.theta.flatten(), strict=True)
    return {path: after.numpy() - before.numpy() for (path, before), after in weights}, metrics


def test_first_matching_pattern_applies():
    plain, _ = changes(make_trainer(descent({})))
    moved, metrics = changes(make_trainer(descent({"*.b": 3.0, "task.output": 0.5, "*": 1.0})))
    factors = {"hidden.b": 3.0, "hidden.w": 1.0, "output.b": 3.0, "output.w": 0.5}
    for path, factor in factors.items():
        np.testing.assert_allclose(moved[path], factor * plain[path], rtol=1e-3, atol=2e-7)
        assert np.abs(plain[path]).max() > 1e-4
    assert float(metrics.learning_rate) == pytest.approx(0.015)


@pytest.mark.parametrize("cls", [Adafactor, Adam, Lion, Momentum, Muon])
def test_factor_of_zero_freezes_weights(cls):
    optimizer = cls.params().set(learning_rate_factors={"hidden": 0})
    if "weight_decay" in optimizer:
        optimizer.weight_decay = 0.1
    trainer = make_trainer(optimizer)
    moved, metrics = changes(trainer)
    for path, change in moved.items():
        assert change.any() != path.startswith("hidden"), path
    assert trainer.state_specs().moments.hidden.w == {}
    assert trainer.theta_specs.hidden.w.is_frozen and not trainer.theta_specs.output.w.is_frozen
    # Its gradient does not count towards the norm either.
    state = trainer.init_state()
    _, _, gradients = trainer.gradients(state.theta, tiny.make_batch(1, 0), tf.constant([1, 1]))
    norm = np.sqrt(sum(np.sum(g.numpy() ** 2) for g in gradients.output.flatten()))
    np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-5)


def test_stacked_weights_match_the_paths_of_their_layers():
    paths = ("encoder.layers[0].w", "encoder.layers[2].w")
    spec = dataclasses.replace(
        one_weight.spec("MH"), path="encoder.layers.body[0].w", layout="RMH", slices=paths
    )
    for pattern in ("encoder", "*.body[0].w", "encoder.layers[?].w", "task.encoder.layers[?]"):
        assert weight_patterns.matches(pattern, spec), pattern
    assert not weight_patterns.matches("decoder", spec)
    with pytest.raises(
        ValueError, match=r"\[f\]: the pattern '.*layers\[2\].*some of the repeated"
    ):
        weight_patterns.check("[f]", ["encoder.layers[2]"], NestedMap(w=spec))


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (
            {"hiden": 0.1},
            r"learning_rate_factors: no layer .* 'hiden'\. Did you mean 'hidden\.[bw]'",
        ),
        ({"hidden": -1}, r"step\.optimizer\.learning_rate_factors\['hidden'\] is -1"),
        ({"hidden": "1"}, r"learning_rate_factors\['hidden'\] is '1'"),
        ({3: 1.0}, r"learning_rate_factors: 3; a pattern of paths such as"),
        ({"*": 0}, r"leaves no weight to train"),
    ],
)
def test_invalid_factors_are_rejected(factors, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(Adam.params().set(learning_rate_factors=factors))


@pytest.mark.parametrize(
    "name",
    ["adafactor.Adafactor", "adam.Adam", "lion.Lion", "momentum.Momentum", "muon.Muon"],
)
def test_gin_chooses_class_and_groups(name):
    bindings = [
        f"step.optimizer = @lingvo_gshard.training.step.{name}",
        'step.optimizer.learning_rate_factors = {"hidden": 0, "*.b": 0.5}',
    ]
    if "Adafactor" not in name:
        bindings.append('step.optimizer.weight_decay_exclude = ("output.*",)')
        bindings.append('step.optimizer.moment_dtype = "int8"')
    params = apply_gin(tiny.experiment_params(), [], bindings)
    assert params.step.optimizer.cls.__name__ == name.partition(".")[2]
    trainer = params.step.instantiate(params.task.instantiate(), params.run.steps)
    specs = trainer.theta_specs
    assert trainer.optimizer.learning_rate_factor(specs.output.b) == 0.5
    assert not trainer.optimizer.moves(specs.hidden.w)
