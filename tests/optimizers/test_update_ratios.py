"""Tests update-to-weight ratios against weights before and after a step."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.initializers import constant
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.optimizer import Optimizer
from lingvo_gshard.training.step.state_part import Update
from lingvo_gshard.wings.optimizers.lion import Lion
from lingvo_gshard.wings.optimizers.momentum import Momentum
from lingvo_gshard.wings.optimizers.muon import Muon
from lingvo_gshard.wings.optimizers.spikes import Spikes
from lingvo_gshard.wings.optimizers.update_ratios import UpdateRatios
from tests import tiny
from tests.training import mixed_task

OPTIMIZERS = {
    "adafactor": Adafactor.params(),
    "relative adafactor": Adafactor.params().set(relative_update=True),
    "adam": Adam.params().set(weight_decay=0.1),
    "int8 adam": Adam.params().set(moment_dtype="int8"),
    "lion": Lion.params().set(weight_decay=0.1),
    "momentum": Momentum.params(),
    "muon": Muon.params().set(weight_decay=0.1),
    "nesterov": Momentum.params().set(nesterov=True),
    "sgd": Momentum.params().set(beta=0.0),
}
# Moments in int8 are rounded after the update was computed from them.
TOLERANCE = {"int8 adam": 0.05}


def ratio(old, new):
    """Returns ||new - old|| / ||new|| over all weights of two trees."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(old, new, strict=True)]
    moved = sum(np.sum(np.square(b - a, dtype=np.float64)) for a, b in pairs)
    return np.sqrt(moved / sum(np.sum(np.square(b, dtype=np.float64)) for _, b in pairs))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_ratios_are_those_of_the_weights_before_and_after(name):
    trainer = mixed_task.trainer_params(update_ratios_every=2, clip_norm=0.5)
    trainer.optimizer = OPTIMIZERS[name]
    trainer = trainer.instantiate(mixed_task.MixedTask.params())
    state = trainer.init_state()
    for index in range(4):
        new_state, metrics = trainer.train_step(state, tiny.make_batch(1, index))
        found = {k: float(v) for k, v in metrics.items() if k.endswith("update_ratio")}
        for weight in ("w_in", "w_out"):
            expected = ratio([state.theta[weight]], [new_state.theta[weight]])
            expected = expected if index % 2 else 0.0
            tolerance = TOLERANCE.get(name, 1e-4)
            assert found[f"{weight}/update_ratio"] == pytest.approx(expected, rel=tolerance)
        state = new_state


def test_weights_of_a_layer_count_together_and_stacked_layers_apart():
    init, slices = constant(0.0), ("encoder.layers[0].w", "encoder.layers[1].w")
    stacked = VariableSpec("encoder.layers.body[0].w", "RM", (2, 3), "float32", init, slices=slices)
    plain = VariableSpec("encoder.layers[1].b", "M", (3,), "float32", init)
    scale = VariableSpec("encoder.final_norm.scale", "M", (3,), "float32", init)
    specs = NestedMap(a=stacked, b=plain, c=scale)
    generator = np.random.default_rng(2)
    weights = [generator.normal(size=spec.shape).astype(np.float32) for spec in specs.flatten()]
    gradients = [generator.normal(size=spec.shape).astype(np.float32) for spec in specs.flatten()]
    optimizer = Momentum.params().set(beta=0.0).instantiate()
    state = NestedMap(
        theta=specs.pack(map(tf.constant, weights)),
        moments=optimizer.moment_specs(specs),
        step=tf.constant(7),
    )
    update = Update(
        state,
        lambda: specs.pack(map(tf.constant, gradients)),
        *(None, {}, tf.constant(0), tf.constant(0.5), tf.constant(False), tf.constant(False)),
    )
    found = UpdateRatios(1, optimizer, specs).measure(update, state)

    def expected(*parts):
        old = [weight + 0.5 * gradient for weight, gradient in parts]
        return ratio(old, [weight for weight, _ in parts])

    (a, b, c), (da, db, dc) = weights, gradients
    assert {name: pytest.approx(float(value), rel=1e-5) for name, value in found.items()} == {
        "encoder.layers[0]/update_ratio": expected((a[0], da[0])),
        "encoder.layers[1]/update_ratio": expected((a[1], da[1]), (b, db)),
        "encoder.final_norm/update_ratio": expected((c, dc)),
    }


def test_a_skipped_step_moves_nothing():
    rule = Spikes.params().set(policy="skip", warmup_steps=2, deviations=0.001)
    trainer = mixed_task.trainer(update_ratios_every=1, spikes=rule)
    state = trainer.init_state()
    for index in range(6):
        state, metrics = trainer.train_step(state, tiny.make_batch(1, index))
        assert (float(metrics["w_in/update_ratio"]) == 0) == bool(metrics.spike)
    assert int(state.spikes.skipped)


def test_only_logged_steps_have_ratios_in_their_rows():
    row = {"loss": 1.0, "encoder.layers[0]/update_ratio": 0.0}
    trainer = mixed_task.trainer(update_ratios_every=50)
    assert trainer.shown_metrics(50, row) == row == mixed_task.trainer().shown_metrics(3, row)
    assert trainer.shown_metrics(49, row) == {"loss": 1.0}


def test_an_optimizer_without_changes_has_no_ratios():
    class Plain(Optimizer):
        pass

    optimizer = Plain.params().instantiate()
    assert UpdateRatios(1, optimizer, NestedMap()).measure(None, None) == {}
