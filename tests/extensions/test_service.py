# tests: training/run/monitoring/step_observer.py, wings/services/observers.py
"""Tests a service of the training loop, written in one file as docs/extending.md says."""

import importlib
import json
import sys

import numpy as np
import pytest
import rich.console
import tensorflow as tf

from lingvo_gshard.api.training import train
from lingvo_gshard.core import context
from lingvo_gshard.training import OBSERVERS, StepObserver
from tests import tiny
from tests.test_docs import ROOT, write_files


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Imports the page's service; returns its module."""
    folder = tmp_path_factory.mktemp("service")
    write_files((ROOT / "docs" / "extending.md").read_text("utf-8"), folder)
    sys.path.append(str(folder))
    module = importlib.import_module("my_service")
    yield module
    sys.path.remove(str(folder))
    sys.modules.pop("my_service", None)
    del OBSERVERS._features["gradient histogram"]


class Weights(StepObserver):
    """Keeps the weights and the batches of the steps that the service reads."""

    every = 10

    def __init__(self, run):
        self.run, self.found = run, {}

    def before_step(self, step, batch):
        self.batch = batch

    def at_period(self, step, row):
        theta = self.run.runtime.theta_on_host().transform(np.copy)
        self.found[step] = theta, self.batch


def _counts(task, theta, batch, seed):
    """Returns the counts of the gradient's elements, by an eager backward pass of the loss."""
    variables = theta.transform(tf.Variable)
    key = tf.constant([seed, 0])
    with context.scope(training=True, seed=key), tf.GradientTape() as tape:
        loss, _ = task.loss(variables.transform(tf.convert_to_tensor), batch)
    gradients = tape.gradient(loss, variables.flatten())
    flat = np.abs(np.concatenate([g.numpy().ravel() for g in gradients]))
    return [int((flat > 10.0**exponent).sum()) for exponent in range(-8, 1)]


@pytest.mark.parametrize("mesh", [None, "data=8"])
def test_a_service_reads_the_gradient_every_ten_steps(service, tmp_path, mesh):
    kept = []

    def keep(run):
        kept.append(Weights(run))
        return kept[0]

    where = {"mesh": mesh} if mesh else {"runtime": "local"}
    params = tiny.experiment_params(23)
    train(params, tmp_path, console=rich.console.Console(quiet=True), observers=[keep], **where)
    lines = (tmp_path / "gradients.jsonl").read_text("utf-8").splitlines()
    rows = {row.pop("step"): list(row.values()) for row in map(json.loads, lines)}
    assert list(rows) == [10, 20]
    (watch,) = kept
    trainer = watch.run.trainer
    for step, counts in rows.items():
        theta, batch = watch.found[step]
        expected = _counts(trainer.task, theta, batch, trainer.p.seed)
        assert 0 < expected[-3] < expected[0]
        # Rounding moves the few elements next to a bound.
        np.testing.assert_allclose(counts, expected, atol=1)


class Ending(StepObserver):
    """Ends the training after the first period."""

    every = 4

    def __init__(self, run):
        self.run = run

    def at_period(self, step, row):
        self.run.end_training()


@pytest.mark.parametrize("evaluate_every", [0, 2, 4])
def test_a_service_ends_the_training_also_where_the_dev_split_is_evaluated(
    tmp_path, evaluate_every
):
    params = tiny.experiment_params(10)
    params.run.evaluate_every_steps = evaluate_every
    quiet = rich.console.Console(quiet=True)
    ended = train(params, tmp_path, console=quiet, observers=[Ending], runtime="local")
    assert (ended.step, ended.finished) == (4, True)
