# tests: layers/stacks/batch_parts.py, layers/measured.py
"""Compares steps whose batch is computed in parts with steps on the whole batch.

Every way to compute parts is combined with every feature that reports something of a part: loss,
gradients and updates must not depend on it.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.layer import VariableSpec, layer_method
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import SwitchRouter, Top2Router, TopKRouter
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.low_precision.fp8 import Histories
from lingvo_gshard.wings.published_layers.routers import (
    ExpertChoiceRouter,
    HashRouter,
    SigmoidRouter,
    SinkhornRouter,
)
from tests.layers.stacks.executions import loop, pipeline, sequential

ROWS, LENGTH, VOCABULARY = 8, 8, 24
LAYER = "decoder.layer.feed_forward"


def add_rows(total_M, value_M):
    """Returns a weight after a step: what the layer has reported is added."""
    return total_M + value_M


class Reporting(FeedForward):
    """Reports a sum for a weight's rule, a loss that is a sum, and losses that are means."""

    def __init__(self, params, path=""):
        super().__init__(params, path)
        zero = initializers.constant(0.0)
        self.create_variable("seen", "M", {"M": self.p.model_dim}, zero, update_rule=add_rows)

    @layer_method
    def fprop(self, theta, x_BLM, *more):
        count, most = float(np.prod(x_BLM.shape[:2])), tf.reduce_max(x_BLM, (1, 2))
        self.report_update("seen", theta.seen, tf.reduce_sum(tf.abs(x_BLM), (0, 1)))
        self.add_loss("sum", 0.01 * tf.reduce_sum(tf.square(x_BLM)), weight=None)
        self.add_loss("mean", 0.1 * tf.reduce_mean(tf.abs(x_BLM)), count)
        large_B = tf.cast(most > 1.0, tf.float32)
        large = tf.reduce_sum(large_B)
        mean = tf.math.divide_no_nan(tf.reduce_sum(most * large_B), large)
        self.add_loss("mean_of_large", 0.1 * mean, large)
        return super().fprop(theta, x_BLM, *more)


def experts(router, **values):
    """Returns values for a stack of experts in every layer, whose capacity drops nothing."""
    if router.cls is not ExpertChoiceRouter:
        router.capacity_factor = 8.0
    return {"decoder.moe_every": 1, "decoder.moe.router": router, **values}


# Values of the task by path; those of the trainer begin with `step.`.
FEATURES = {
    "plain": {},
    "future_tokens": {
        "future_tokens": 2,
        "add_positions": False,
        "decoder.layer.self_attention.rotary_fraction": 1.0,
    },
    "future_z_loss": {"future_tokens": 1, "z_loss_weight": 0.1},
    "z_loss": {"z_loss_weight": 0.1},
    "label_smoothing": {"label_smoothing": 0.1},
    "own_layer": {LAYER: Reporting.params()},
    "lora": {"lora.rank": 2, "lora.weights": ("*.self_attention", "*.feed_forward")},
    "delayed_scales": {"step.precision": "fp8", "step.fp8.delayed_scales": True},
    "delayed_chunks": {
        **experts(TopKRouter.params().set(k=2)),
        "decoder.moe.exchange.chunks": 2,
        "step.precision": "fp8",
        "step.fp8.delayed_scales": True,
    },
    "loss_scale": {"step.precision": "float16"},
    "top2": experts(Top2Router.params().set(second_expert="all")),
    "router_z_loss": experts(TopKRouter.params().set(k=2, z_loss_weight=0.1)),
    "balance_loss": experts(TopKRouter.params().set(k=2, auxiliary_loss_weight=0.2)),
    "switch": experts(SwitchRouter.params().set(jitter=0.0)),
    "sigmoid": experts(SigmoidRouter.params().set(k=2, auxiliary_loss_weight=0.2)),
    "sinkhorn": experts(SinkhornRouter.params().set(allow_causal=True, z_loss_weight=0.1)),
    "hash": experts(HashRouter.params().set(k=2)),
    "expert_choice": experts(ExpertChoiceRouter.params().set(allow_causal=True, z_loss_weight=0.1)),
    "shared_expert": experts(TopKRouter.params().set(k=2), **{"decoder.moe.shared_hidden_dim": 8}),
    "translation": {
        "encoder.moe_every": 1,
        "encoder.moe.router": TopKRouter.params().set(
            k=2, capacity_factor=8.0, auxiliary_loss_weight=0.2, z_loss_weight=0.1
        ),
    },
    "translation_smoothing": {"encoder.moe_every": 0, "label_smoothing": 0.1},
}
# The executions of the stacks, and micro-batches of the step.
EXECUTIONS = {
    "micro_2": (sequential(), 2),
    "micro_4": (sequential(), 4),
    "micro_remat": (sequential("full"), 4),
    "interleaved": (sequential(interleaved=2), 1),
    "interleaved_remat": (sequential("full", interleaved=4), 1),
    "interleaved_loop": (loop(interleaved=2), 1),
    "pipeline_2": (pipeline(2), 1),
    "pipeline_4": (pipeline(1, micro_batches=4), 1),
    "micro_interleaved": (loop(interleaved=2), 2),
    "micro_pipeline": (pipeline(2), 2),
}
REFUSED = {("delayed_scales", "pipeline"), ("delayed_chunks", "pipeline")}
# What rounds gradients to 8 or 16 bits; there, terms of a sum are rounded separately.
TOLERANCES = {"delayed_scales": 0.05, "delayed_chunks": 0.05, "loss_scale": 5e-3}


def trainer(feature, execution, micro_batches):
    """Returns the trainer of a feature, of a translation if the name says so."""
    values = FEATURES[feature]
    if feature.startswith("translation"):
        task = TranslationTask.params().set(
            source_vocabulary_size=VOCABULARY, target_vocabulary_size=VOCABULARY
        )
        stacks = (task.encoder, task.decoder)
    else:
        task = LanguageModelTask.params().set(vocabulary_size=VOCABULARY)
        stacks = (task.decoder,)
    task.model_dim = 8
    for stack in stacks:
        stack.set(num_layers=2, num_heads=2, hidden_dim=12, moe_every=0, execution=execution)
        stack.moe.set(num_experts=4, group_size=LENGTH)
    step = Trainer.params().set(micro_batches=micro_batches)
    for path, value in values.items():
        target, path = (step, path[5:]) if path.startswith("step.") else (task, path)
        target.set_path(path, value)
    return step.instantiate(task)


@functools.cache
def batch(feature):
    """Returns rows with different numbers of tokens; 0 and 4 have no target tokens."""
    rng = np.random.default_rng(3)
    lengths = {"target": [0, 8, 3, 5, 0, 2, 7, 6], "source": [7, 1, 8, 2, 5, 3, 8, 4]}
    arrays = {}
    for side in ("target", "source") if feature.startswith("translation") else ("target",):
        places = np.arange(LENGTH)
        segments = (places < np.array(lengths[side])[:, None]).astype(np.int32)
        arrays[f"{side}_segments"] = segments
        arrays[f"{side}_positions"] = (places * segments).astype(np.int32)
        for name in ("source_ids",) if side == "source" else ("target_inputs", "target_labels"):
            ids = rng.integers(3, VOCABULARY, (ROWS, LENGTH))
            arrays[name] = (ids * segments).astype(np.int32)
    # A step that is traced may ask first.
    with tf.init_scope():
        return {name: tf.constant(value) for name, value in arrays.items()}


def by_path(specs, tree):
    """Returns path -> array, with the slices of stacked weights one by one."""
    found = {}
    for spec, array in zip(specs.flatten(), tree.flatten(), strict=True):
        assert isinstance(spec, VariableSpec)
        slices = array.numpy().reshape(-1, *spec.shape[spec.stacked :])
        found.update(zip(spec.slices or [spec.path], slices, strict=True))
    return found


def result(feature, execution, micro_batches, compiled=False):
    """Returns the loss, the gradients by path, and what histories measure by path."""
    made = trainer(feature, execution, micro_batches)
    state = made.init_state()

    def compute():
        return made.step_gradients(state, batch(feature))

    run = tf.function(compute, jit_compile=True, autograph=False) if compiled else compute
    loss, metrics, gradients = run()
    measured = gradients.pop(Histories.name, None)
    found = by_path(made.theta_specs, gradients)
    own = by_path(made.state_specs()[Histories.name], measured) if measured else {}
    return float(loss), found, own, metrics


@functools.cache
def whole(feature, compiled):
    return result(feature, sequential(), 1, compiled)


def check(feature, execution, compiled=False):
    """Compares one execution with layers that compute the whole batch one by one."""
    loss, gradients, measured, metrics = result(feature, *EXECUTIONS[execution], compiled)
    expected, expected_gradients, expected_measured, _ = whole(feature, compiled)
    # XLA keeps more digits within a fusion than the type has, and fuses a part differently.
    tolerance = TOLERANCES.get(feature, 2e-5) * (5 if compiled else 1)
    np.testing.assert_allclose(loss, expected, rtol=tolerance)
    if "loss" in metrics and EXECUTIONS[execution][1] > 1:
        np.testing.assert_allclose(metrics["loss"][0], expected, rtol=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for path, found in gradients.items():
        one = expected_gradients[path]
        atol = tolerance * max(np.abs(one).max(), 1e-3)
        np.testing.assert_allclose(found, one, rtol=tolerance, atol=atol, err_msg=path)
    assert measured.keys() == expected_measured.keys()
    for path, found in measured.items():
        np.testing.assert_allclose(found, expected_measured[path], rtol=0.15, err_msg=path)


def is_refused(feature, execution):
    return any(feature == f and e in execution for f, e in REFUSED)


PAIRS = [p for p in itertools.product(FEATURES, EXECUTIONS) if not is_refused(*p)]
# Coprime to the number of executions, so that the fast cases have all of them.
EVERY = 9


@pytest.mark.parametrize(
    ("feature", "execution"),
    [
        pair if i % EVERY == 0 else pytest.param(*pair, marks=pytest.mark.slow)
        for i, pair in enumerate(PAIRS)
    ],
)
def test_a_batch_in_parts_has_the_loss_and_the_gradients_of_the_whole(feature, execution):
    check(feature, execution)


@pytest.mark.parametrize(
    ("feature", "execution"),
    [
        ("future_tokens", "micro_4"),
        *(
            pytest.param(feature, execution, marks=pytest.mark.slow)
            for feature in ("own_layer", "router_z_loss", "translation", "delayed_scales")
            for execution in ("micro_interleaved", "micro_pipeline", "interleaved_loop")
            if not is_refused(feature, execution)
        ),
    ],
)
def test_compiled_steps_do_as_well(feature, execution):
    check(feature, execution, compiled=True)


def test_losses_of_a_pass_on_the_whole_batch_are_as_reported():
    with context.use(context.Context(training=True)) as now:
        now.add_loss("a", tf.constant(3.0), 7.0)
        now.add_loss("a", tf.constant(2.0), None)
        assert float(now.include_losses()) == 5.0
        assert now.loss_weights["a_1"] is None and float(now.loss_weights["a"]) == 7.0
