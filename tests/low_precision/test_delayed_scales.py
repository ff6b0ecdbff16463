# tests: wings/low_precision/delayed_scales.py, wings/low_precision/fp8.py
# tests: wings/low_precision/rounding.py, layers/measured.py, wings/low_precision/measured.py
"""Compares products by delayed scales, and what steps measure for them, with NumPy."""

from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import products
from lingvo_gshard.wings.low_precision import delayed_scales
from lingvo_gshard.wings.low_precision.delayed_scales import STEPS
from lingvo_gshard.wings.low_precision.fp8 import Fp8
from lingvo_gshard.wings.low_precision.rounding import DelayedScales
from lingvo_gshard.wings.optimizers.local_updates import LocalUpdates
from tests.layers.stacks.executions import loop, pipeline, sequential
from tests.low_precision.test_rounding import E4M3, E5M2, LARGEST, power_of_two
from tests.runtime import tiny_translation

EQUATION, GRADIENT_OF_X, GRADIENT_OF_W = "BLM,MH->BLH", "BLH,MH->BLM", "BLM,BLH->MH"
# Magnitudes of activations, weight and gradients of earlier steps.
KNOWN = (2.0, 0.5, 3.0)


def history(steps=STEPS):
    """Returns a history whose largest magnitudes, in different steps, are KNOWN."""
    found = np.full((3, steps), 0.01, np.float32)
    for row, largest in enumerate(KNOWN):
        found[row, 3 * row] = largest
    return tf.constant(found)


def rounded(x, largest, number_format):
    """Returns a tensor rounded with the scale of a given magnitude."""
    scale, most = power_of_two(np.array(largest), number_format), LARGEST[number_format]
    ratio = np.clip(x.astype(np.float64) / scale, -most, most)
    return ratio.astype(np.float32).astype(number_format).astype(np.float64) * scale


def product(x, w, dz, history_fh):
    """Returns a product by delayed scales, and the gradients of its factors and its history."""
    x, w = tf.constant(x), tf.constant(w)
    with (
        context.override_extension(products.ProductContext, rounding=DelayedScales()),
        tf.GradientTape() as tape,
    ):
        tape.watch([x, w, history_fh])
        z = products.multiply(EQUATION, x, w, NestedMap(w_history=history_fh), ("w",))
    found = tape.gradient(z, [x, w, history_fh], output_gradients=cast(Any, tf.constant(dz)))
    return [t.numpy() for t in (z, *found)]


def factors():
    """Returns activations and a gradient with numbers beyond KNOWN, and a weight without."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return 2.5 * draw(2, 5, 8), np.clip(draw(8, 6), -0.4, 0.4), 2.5 * draw(2, 5, 6)


def test_factors_are_rounded_by_their_history_and_larger_ones_are_clipped():
    x, w, dz = factors()
    assert np.abs(x).max() > 448 * power_of_two(np.array(KNOWN[0]), E4M3) > KNOWN[0]
    z, dx, dw, _ = product(x, w, dz, history())
    x, w = rounded(x, KNOWN[0], E4M3), rounded(w, KNOWN[1], E4M3)
    dz = rounded(dz, KNOWN[2], E5M2)
    np.testing.assert_allclose(z, np.einsum(EQUATION, x, w), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, np.einsum(GRADIENT_OF_X, dz, w), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, np.einsum(GRADIENT_OF_W, x, dz), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_history_is_what_the_product_measures():
    x, w, dz = factors()
    *_, measured = product(x, w, dz, history())
    np.testing.assert_array_equal(measured[:, 0], [np.abs(t).max() for t in (x, w, dz)])
    np.testing.assert_array_equal(measured[:, 1:], 0)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_clipped(value):
    x, w, dz = factors()
    x[1, 2, 3] = value
    z, *_, measured = product(x, w, dz, history())
    assert np.isnan(z[1, 2]).all() and np.isfinite(z[0]).all()
    assert np.isinf(measured[0, 0])


def test_products_without_a_history_have_scales_of_their_step():
    x, w, _ = factors()
    with context.override_extension(products.ProductContext, rounding=DelayedScales()):
        z = products.multiply(EQUATION, tf.constant(x), tf.constant(w)).numpy()
    x, w = (rounded(t, np.abs(t).max(), E4M3) for t in (x, w))
    np.testing.assert_allclose(z, np.einsum(EQUATION, x, w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stacked", [(), (2,)])
def test_a_history_moves_on_unless_nothing_was_measured(stacked):
    old = np.broadcast_to(np.arange(3.0 * STEPS).reshape(3, STEPS), (*stacked, 3, STEPS))
    measured = np.zeros_like(old)
    measured[..., 0] = [7.0, 0.0, np.inf]
    new = delayed_scales.updated(tf.constant(old), tf.constant(measured)).numpy()
    np.testing.assert_array_equal(new[..., 0, 0], 7)
    np.testing.assert_array_equal(new[..., 0, 1:], old[..., 0, :-1])
    np.testing.assert_array_equal(new[..., 1:, :], old[..., 1:, :])


def trainer(execution=None, **values):
    """Returns a trainer of two layers on each side, with delayed scales."""
    stack = {"moe_every": 0, "residual_dropout_rate": 0.0, "execution": execution or sequential()}
    values = {"precision": "fp8", "fp8": Fp8.params().set(delayed_scales=True), **values}
    return tiny_translation.trainer(stack_values=stack, **values)


def stepped(made, steps=2):
    """Returns the states of a run, the first before its first step."""
    states = [made.init_state()]
    step = tf.function(made.train_step, autograph=False)
    for index in range(steps):
        batch = {k: tf.constant(v) for k, v in tiny_translation.batch(index).items()}
        states.append(step(states[-1], batch)[0])
    return states


def named(made, state):
    """Returns path -> history."""
    paths = [spec.path for spec in made.state_specs().histories.flatten()]
    return dict(zip(paths, (h.numpy() for h in state.histories.flatten()), strict=True))


def test_a_step_measures_the_weights_that_it_begins_with():
    made = trainer()
    first, second, third = stepped(made)
    path = "encoder.layers[0].feed_forward.w_in"

    def largest(state):
        weight = dict(state.theta.flatten_items())[path].numpy()
        return np.abs(weight.astype(ml_dtypes.bfloat16).astype(np.float32)).max()

    found = named(made, third)[f"{path}_history"]
    np.testing.assert_array_equal(found[1, :2], [largest(second), largest(first)])
    np.testing.assert_array_equal(found[:, 2:], named(made, first)[f"{path}_history"][:, 2:])
    assert (found[:, :2] > 0).all() and (found[2, :2] < 0.1).all()


@pytest.mark.slow
def test_micro_batches_measure_the_largest_of_the_batch():
    whole, parts = (named(m, stepped(m, 1)[1]) for m in (trainer(), trainer(micro_batches=2)))
    assert whole.keys() == parts.keys()
    for path, found in whole.items():
        np.testing.assert_allclose(parts[path], found, rtol=0.05, err_msg=path)
    first = "encoder.layers[0].self_attention.w_query_history"
    np.testing.assert_array_equal(parts[first][:2], whole[first][:2])


@pytest.mark.slow
def test_layers_of_a_loop_have_histories_of_their_own():
    one_by_one, looped = trainer(), trainer(loop("full"))
    single, stacked = (named(m, stepped(m, 1)[1]) for m in (one_by_one, looped))
    for layer in range(2):
        for name in ("self_attention.w_query", "self_attention.w_out", "feed_forward.w_out"):
            of_layer = single[f"decoder.layers[{layer}].{name}_history"]
            of_loop = stacked[f"decoder.layers.body[0].{name}_history"][layer]
            np.testing.assert_allclose(of_loop, of_layer, rtol=0.05, err_msg=name)


@pytest.mark.slow
def test_a_model_learns_and_is_evaluated():
    made = trainer()
    states = stepped(made, 12)
    batch = {k: tf.constant(v) for k, v in tiny_translation.batch(0).items()}
    evaluate = tf.function(made.eval_step, autograph=False)
    losses = [float(evaluate(s.theta, batch).loss[0]) for s in (states[0], states[-1])]
    assert losses[1] < losses[0] - 0.2


def test_theta_has_no_histories():
    made = trainer()
    paths = [path for path, _ in made.init_state().theta.flatten_items()]
    assert not any("history" in path for path in paths)
    for specs in (made.theta_specs, made.task.variable_specs()):
        assert len(paths) == len(specs.flatten())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precision": "bfloat16"}, "step.fp8.delayed_scales is True, but step.precision is 'bflo"),
        ({"execution": pipeline(1)}, "encoder.layers is a pipeline"),
        ({"local_updates": LocalUpdates.params().set(every=2)}, "step.local_updates.every is 2"),
    ],
)
def test_what_cannot_be_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        trainer(**values)


def test_an_unknown_type_of_gradients_is_refused():
    with pytest.raises(UserError, match="Fp8.gradients is 'e4m4'; expected 'e5m2' or 'e4m3'"):
        Fp8.params().set(gradients="e4m4")
