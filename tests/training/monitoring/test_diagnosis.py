"""Checks that a diagnosis names the layer at which a step became non-finite."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.training.monitoring.diagnosis import diagnose
from tests import tiny


def make():
    params = tiny.experiment_params()
    params.task.hidden.dropout = 0.0
    trainer = params.trainer.instantiate(params.task.instantiate())
    theta = trainer.init_state().theta.transform(np.array)
    return trainer, theta


def test_diagnosis_names_the_first_non_finite_layer():
    trainer, theta = make()
    theta.output.w[0, 0] = np.inf
    theta.output.b[1] = np.nan
    found = diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
    assert found == "the first layer whose output is not finite is output"
    theta.hidden.w[0, 0] = np.nan
    found = diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
    assert found == "the first layer whose output is not finite is hidden"


def test_diagnosis_names_weights_whose_gradient_overflows():
    trainer, theta = make()

    @tf.custom_gradient
    def overflow(x):
        return x, lambda dy: dy * np.inf

    plain = trainer.task.hidden.fprop
    trainer.task.hidden.fprop = lambda *arguments: overflow(plain(*arguments))
    found = diagnose(trainer, theta, tiny.make_batch(1, 0), 3)
    assert found.startswith("the loss is finite, but the gradient is not for hidden.b, hidden.w")


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
