"""Precision: dtypes of each name, what stays float32, and stochastic rounding of weights."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.attention.dense import DenseKernel
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.precision import precision_names
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.long_inputs.blockwise import BlockwiseKernel
from lingvo_gshard.wings.optimizers.momentum import Momentum
from tests import tiny
from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation
from tests.training import mixed_task

TYPES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("float32", "bfloat16"),
    "bfloat16_weights": ("bfloat16", "bfloat16"),
    "float16": ("float32", "float16"),
    "fp8": ("float32", "bfloat16"),
    "fp8_blocks": ("float32", "bfloat16"),
    "mxfp8": ("float32", "bfloat16"),
    "nvfp4": ("float32", "bfloat16"),
    "int8": ("float32", "bfloat16"),
}
NARROW = (tf.bfloat16, tf.float16)

# Operations that need float32 precision: logarithms, exponentials, roots and quotients of
# softmaxes and norms, sums, and comparisons of close numbers.
DELICATE = {
    *("Exp", "Log", "Log1p", "Softmax", "LogSoftmax", "Sigmoid", "Tanh", "Rsqrt", "Sqrt"),
    *("Sum", "Mean", "Max", "Prod", "Cumsum", "UnsortedSegmentSum", "SegmentSum"),
    *("TopKV2", "ArgMax", "Square", "Sin", "Cos"),
}


@pytest.mark.parametrize("precision", precision_names())
def test_precision_sets_the_dtypes_of_weights_and_activations(precision):
    trainer = mixed_task.trainer(precision=precision)
    weights, activations = TYPES[precision]
    assert (trainer.task.p.dtype, trainer.task.p.fprop_dtype) == (weights, activations)
    state, metrics = trainer.train_step(trainer.init_state(), tiny.make_batch(1, 0))
    assert {w.dtype.name for w in state.theta.flatten()} == {weights}
    assert {moment.dtype.name for moment in state.moments.flatten()} == {"float32"}
    assert {value.dtype.name for value in metrics.values()} == {"float32"}
    for (path, value), spec in zip(
        state.flatten_items(), trainer.state_specs().flatten(), strict=True
    ):
        assert (value.dtype.name, tuple(value.shape)) == (spec.dtype, spec.shape), path


def test_unknown_precision_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"step\.precision is 'bfloat61'. Did you mean 'bflo"):
        mixed_task.trainer(precision="bfloat61")


@pytest.mark.parametrize(
    ("task", "precision"),
    [
        ({"fprop_dtype": "bfloat16"}, "float32"),
        ({"fprop_dtype": "float16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16_weights"),
    ],
)
@pytest.mark.parametrize("is_made", [False, True])
def test_dtypes_that_contradict_the_precision_are_rejected(task, precision, is_made):
    (name,) = task
    params = mixed_task.MixedTask.params().set(**task)
    with pytest.raises(ValueError, match=rf"task\.{name} is .*step\.precision='{precision}'"):
        mixed_task.trainer_params(precision=precision).instantiate(
            params.instantiate() if is_made else params
        )


def test_task_without_activation_dtypes_is_rejected():
    with pytest.raises(ValueError, match=r"precision='float16' .* TinyTask only in float32"):
        mixed_task.trainer_params(precision="float16").instantiate(tiny.TinyTask.params())


def operations(graph, seen=None):
    """Yields the operations of a graph and of the functions it calls."""
    seen = {} if seen is None else seen
    for operation in graph.get_operations():
        yield operation
        for attribute in operation.node_def.attr.values():
            name = attribute.func.name
            if name and name not in seen:
                seen[name] = graph._get_function(name).graph
                yield from operations(seen[name], seen)


def translation(precision: str, **stack) -> Trainer:
    """Returns a trainer with two encoder layers, the second with experts, and one decoder layer."""
    task: Params = TranslationTask.params().set(
        source_vocabulary_size=32, target_vocabulary_size=32, model_dim=16
    )
    for side in (task.encoder, task.decoder):
        side.set(num_layers=2, num_heads=4, hidden_dim=16, residual_dropout_rate=0.1, **stack)
        side.moe.set(num_experts=4, group_size=12)
        side.layer.self_attention.set(relative_buckets=4, logit_cap=20.0, rotary_fraction=0.5)
        side.layer.cross_attention.logit_cap = 20.0
    if not stack:
        task.decoder.set(num_layers=1, moe_every=0)
    params = Trainer.params().set(clip_norm=1.0, optimizer=Adam.params(), average_decay=0.9)
    return params.set(precision=precision).instantiate(task)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "stack"),
    [
        ("bfloat16_weights", {}),
        ("fp8", {}),
        pytest.param("float16", {"execution": loop("full")}, marks=pytest.mark.slow),
    ],
)
def test_sensitive_operations_are_float32(precision, stack):
    """Checks the graph of a whole training step without running it."""
    trainer = translation(precision, **stack)
    state = trainer.state_specs().transform(lambda spec: tf.TensorSpec(spec.shape, spec.dtype))
    batch = tiny_translation.batch(0)
    specs = {name: tf.TensorSpec(x.shape, x.dtype) for name, x in batch.items()}
    step = tf.function(trainer.train_step, autograph=False).get_concrete_function(state, specs)
    found = list(operations(step.graph))
    narrow = {
        operation.name: operation.type
        for operation in found
        if any(tensor.dtype in NARROW for tensor in operation.inputs)
    }
    assert {"Einsum", "Relu", "GatherV2"} <= set(narrow.values())
    assert not {name: kind for name, kind in narrow.items() if kind in DELICATE}
    # The graph has some operations of each kind.
    kinds = {operation.type for operation in found}
    assert {"Exp", "Log", "Rsqrt", "Sum", "Softmax", "Cumsum"} <= kinds


@pytest.mark.parametrize(
    "kernel", [DenseKernel.params(), BlockwiseKernel.params().set(block_size=3)]
)
def test_masked_logits_do_not_overflow_in_float16(kernel):
    """A row consists of padding only, and logits have a cap and a window."""
    attention = SelfAttention.params().set(
        model_dim=8, num_heads=2, window=3, logit_cap=5.0, kernel=kernel, is_causal=True
    )
    layer = attention.instantiate(path="attention")
    theta, segments = layer.init(1), tf.constant([[1, 1, 1, 2, 2, 0], [0] * 6])
    x = np.random.default_rng(1).normal(size=(2, 6, 8))
    results = []
    for dtype in (tf.float32, tf.float16):
        with tf.GradientTape() as tape:
            inputs = tf.constant(x, dtype)
            tape.watch(inputs)
            output = layer.fprop(theta, inputs, layer.mask(segments))
            assert output.dtype == dtype
        results.append((output, tape.gradient(output, inputs)))
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-2)


def test_stochastic_rounding_applies_updates_below_bfloat16_resolution():
    """Weights of 1 move by 1e-4, while bfloat16's neighbors are 2^-8 and 2^-7 away."""
    spec = VariableSpec("w", "MH", (64, 64), "bfloat16", initializers.constant(1.0))
    specs, theta = NestedMap(w=spec), NestedMap(w=tf.ones((64, 64), tf.bfloat16))
    optimizer = Momentum(Momentum.params().set(beta=0.0))
    gradient = NestedMap(w=tf.ones((64, 64)))
    for step in range(20):
        theta, _ = optimizer.update(
            specs, theta, gradient, NestedMap(w=NestedMap()), tf.constant(step), 1e-4
        )
    assert theta.w.dtype == tf.bfloat16
    moved = 1.0 - tf.cast(theta.w, tf.float32).numpy()
    np.testing.assert_array_equal(moved % 2.0**-8, 0.0)
    # Of so many independent roundings the mean is within five standard deviations.
    np.testing.assert_allclose(moved.mean(), 20e-4, atol=5 * 2.0**-9 / 64)


def test_frozen_bfloat16_weights_do_not_change():
    spec = VariableSpec("w", "M", (64,), "bfloat16", initializers.normal(1.0))
    specs = NestedMap(w=spec)
    theta = NestedMap(w=spec.init(tf.constant([1, 2])))
    optimizer = Adam(Adam.params())
    moments = optimizer.moment_specs(specs).transform(lambda s: s.init(tf.constant([0, 0])))
    gradient = NestedMap(w=tf.fill([64], np.nan))
    held, _ = optimizer.update(
        specs, theta, gradient, moments, tf.constant(3), 0.1, tf.constant(True)
    )
    np.testing.assert_array_equal(held.w, theta.w)


@pytest.mark.parametrize("precision", precision_names())
def test_training_learns_in_each_precision(precision):
    trainer = mixed_task.trainer(precision=precision)
    state, losses = trainer.init_state(), []
    for index in range(60):
        state, metrics = trainer.train_step(state, tiny.make_batch(1, index))
        losses.append(float(metrics.loss))
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:5])
