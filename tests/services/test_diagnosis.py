# tests: wings/services/divergence.py, wings/tracing/non_finite.py
"""Checks that a diagnosis names the layer at which a step became non-finite."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.wings.services.divergence import diagnose
from tests import tiny


def make():
    params = tiny.experiment_params()
    params.task.hidden.dropout = 0.0
    trainer = params.step.instantiate(params.task.instantiate(), params.run.steps)
    theta = trainer.init_state().theta.transform(np.array)
    return trainer, theta


def test_diagnosis_names_the_first_non_finite_layer():
    trainer, theta = make()
    theta.output.w[0, 0] = np.inf
    theta.output.b[1] = np.nan
    found = diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
    assert found == (
        "the first layer whose output is not finite is output: before the step, its weight "
        "output.b is not finite either"
    )
    theta.hidden.w[0, 0] = np.nan
    found = diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
    assert found.startswith("the first layer whose output is not finite is hidden: before")


def test_diagnosis_names_weights_whose_gradient_overflows():
    trainer, theta = make()

    @tf.custom_gradient
    def overflow(x):
        return x, lambda dy: dy * np.inf

    plain = trainer.task.hidden.fprop
    trainer.task.hidden.fprop = lambda *arguments: overflow(plain(*arguments))
    found = diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
    assert found.startswith("the loss is finite, but the gradient is not for hidden.b, hidden.w")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        # 0 * log(0), 0 / 0, and inf - inf.
        (
            lambda x: 0.0 * tf.math.log(x - x),
            "Mul at {0} makes NaN; before it, Log at {0} makes inf",
        ),
        (lambda x: (x - x) / (x - x), "RealDiv at {0} makes NaN"),
        (lambda x: tf.exp(x * 0 + 100.0), "Exp at {0} makes infinity"),
    ],
)
def test_the_operation_that_makes_nan_or_infinity_is_named_with_its_line(spoil, words):
    trainer, theta = make()
    layer = trainer.task.hidden
    # A mask of -inf is no mistake, and is not what the diagnosis names.
    masked = tf.constant([[-np.inf] + [0.0] * (tiny.INPUTS - 1)])

    class Spoiled(type(layer)):
        @layer_method
        def fprop(self, theta, x_BM, training):
            x_BM += 0.0 * tf.nn.softmax(x_BM + masked)
            return self.observe(spoil(tf.matmul(x_BM, theta.w)))

    layer.__class__ = Spoiled
    found = diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
    line = f"test_diagnosis.py:{spoil.__code__.co_firstlineno}"
    begin = "the first layer whose output is not finite is hidden: "
    assert found.startswith(begin + words.format(line)), found


def test_the_line_that_a_gradient_belongs_to_is_named():
    trainer, theta = make()
    layer = trainer.task.hidden

    class Rooted(type(layer)):
        @layer_method
        def fprop(self, theta, x_BM, training):
            y_BH = super().fprop(theta, x_BM, training)
            return y_BH + tf.sqrt(y_BH - y_BH)

    layer.__class__ = Rooted
    found = diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
    line = f"test_diagnosis.py:{Rooted.fprop.__wrapped__.__code__.co_firstlineno + 3}"
    assert found.startswith("the loss is finite, but the gradient is not for hidden.b, hidden.w: ")
    assert f"SqrtGrad of what {line} computes makes " in found, found


def test_diagnosis_names_the_loss():
    trainer, theta = make()
    plain = trainer.task.loss

    def loss(theta, batch):
        value, metrics = plain(theta, batch)
        return value * np.inf, metrics

    trainer.task.loss = loss
    assert "but the loss is not" in diagnose(trainer, theta, tiny.make_batch(1, 0), 3)


def test_diagnosis_reports_if_the_step_is_finite_when_repeated():
    trainer, theta = make()
    assert "the compiled step overflows" in diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
