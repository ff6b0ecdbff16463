# tests: keras/planned.py, keras/verified.py, keras/step_programs.py
"""Plans a Keras model's step, and verifies it over a mesh in float64."""

import types

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.core.lazy import mlir, stablehlo
from lingvo_gshard.keras import planned
from lingvo_gshard.runtime.lowering.operations import operations_of
from tests.keras import models

TENSOR = {r".*/hidden/kernel": (None, "model"), r".*/out/kernel": ("model", None)}


def test_a_step_is_verified_in_float64():
    x, y = models.images()
    model = models.dense()
    before = [np.array(value) for value in model.get_weights()]
    found = lingvo_gshard.keras.verify(model, (x[:8], y[:8]), mesh="data=4,model=2", layout=TENSOR)
    assert found.is_equal and len(found.compared) == 2 + len(model.variables) + len(
        model.optimizer.variables
    ) + len(model.metrics_variables)
    for value, kept in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, kept)


def test_a_plan_has_the_weights_and_the_collectives():
    model = models.dense()
    batch = tf.TensorSpec((16, 8, 8, 1)), tf.TensorSpec((16,), tf.int64)
    plan = lingvo_gshard.keras.plan(model, batch, "cpu:8", mesh="data=4,model=2", layout=TENSOR)
    # The two numbers are dropout's seed.
    assert plan.parameters.total == model.count_params() + 2
    rows = {row.path: row for row in plan.tensors}
    kernel = rows["theta.dense/hidden/kernel"]
    assert kernel.bytes == 4 * 64 * 16 and kernel.bytes_per_device == kernel.bytes // 2
    moments = [row for row in plan.tensors if row.kind == "moments" and "hidden_kernel" in row.path]
    assert [row.bytes_per_device for row in moments] == [kernel.bytes_per_device] * 2
    # The sum over the parts of `hidden`, forward, and gradients over the batch.
    assert "all-reduce" in {row.kind for row in plan.collectives}
    # Forward, and the gradient of the weight: there is none of the images.
    assert 8 * plan.flops.executed >= 2 * 2 * 16 * 64 * 16


def _cnn_batch():
    return tf.TensorSpec((16, 8, 8, 1)), tf.TensorSpec((16,), tf.int64)


def _ids_batch():
    return tf.TensorSpec((16, models.LENGTH), tf.int32), tf.TensorSpec((16,), tf.int64)


@pytest.mark.parametrize(
    "make, batch",
    [
        (models.dense, _cnn_batch),
        (models.cnn, _cnn_batch),
        (models.grouped_cnn, _cnn_batch),
        (models.lstm, _ids_batch),
        (
            models.transformer,
            lambda: [tf.TensorSpec((16, models.LENGTH), tf.int32)] * 2,
        ),
    ],
)
def test_the_program_of_a_plan_has_operations_that_every_compiler_knows(make, batch, monkeypatch):
    """TensorFlow copies variables' new values by an operation of its own."""
    monkeypatch.setattr(
        planned,
        "plan_program",
        lambda found, *_, **__: types.SimpleNamespace(program=found.program),
    )
    program = lingvo_gshard.keras.plan(make(), tuple(batch()), "cpu:8").program
    with mlir.make_ir_context() as context:
        module = stablehlo.deserialize_portable_artifact(context, program.module)
        names = {operation.name.partition(".")[0] for operation in operations_of(module)}
    assert names <= {"builtin", "func", "stablehlo", "chlo"}


@pytest.mark.slow
def test_a_mixture_of_experts_is_verified_and_planned():
    ids, following = models.tokens()
    model, batch = models.transformer(8), (ids[:8], following[:8])
    assert lingvo_gshard.keras.verify(model, batch, mesh="data=8", strategy="expert").is_equal
    plan = lingvo_gshard.keras.plan(model, batch, "cpu:8", mesh="data=8", strategy="expert")
    assert "all-to-all" in {row.kind for row in plan.collectives}
