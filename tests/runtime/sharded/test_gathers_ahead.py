# tests: wings/repeat/loop.py, training/step/gradients.py
"""Compares loops that gather weights one layer ahead with those that gather all weights before."""

from unittest import mock

import numpy as np
import pytest

from lingvo_gshard.training.step.gradients import Gradients
from lingvo_gshard.training.step.trainer import Trainer
from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation, trainings

STEPS, LAYERS = 3, 3


def make_trainer(policy: str, precision: str = "bfloat16") -> Trainer:
    """Returns a trainer whose layers are a loop on each side."""
    stack = {
        "num_layers": LAYERS,
        "moe_every": 0,
        "residual_dropout_rate": 0.0,
        "execution": loop(policy),
    }
    return tiny_translation.trainer(precision=precision, stack_values=stack)


def run(policy, mesh, strategy, precision="bfloat16"):
    """Returns losses, the last weights, and the collectives of the step."""
    runtime = trainings.on_mesh(make_trainer(policy, precision), mesh, strategy)
    losses = [metrics["loss"] for metrics in trainings.train(runtime, STEPS)]
    return losses, runtime.state().theta, runtime.executable("train").collectives()


def gathered_in_loops(calls):
    return [call for call in calls if call.kind == "all-gather" and call.times >= LAYERS]


@pytest.mark.parametrize(
    ("policy", "mesh", "strategy", "precision"),
    [
        ("full", "data=8", "zero1", "bfloat16"),
        pytest.param("none", "data=8", "zero1", "bfloat16", marks=pytest.mark.slow),
        pytest.param("products", "data=8", "zero1", "fp8", marks=pytest.mark.slow),
        pytest.param(
            "products",
            "data=4,model=2",
            "zero1_sequence_tensor",
            "bfloat16",
            marks=pytest.mark.slow,
        ),
        # Master weights are padded to three parts.
        pytest.param("full", "data=3", "zero1", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_weights_gathered_one_layer_ahead_train_as_those_gathered_before(
    policy, mesh, strategy, precision
):
    losses, theta, calls = run(policy, mesh, strategy, precision)
    with mock.patch.object(Gradients, "gathers_ahead", False):
        before, expected, calls_before = run(policy, mesh, strategy, precision)
    np.testing.assert_allclose(losses, before, rtol=1e-6)
    trainings.assert_same_arrays(theta, expected, relative=1e-7, absolute=1e-5)
    more = len(gathered_in_loops(calls)) - len(gathered_in_loops(calls_before))
    # Four weights of attention and two of the feed-forward layer; the decoder has cross-attention.
    assert more == 16


@pytest.mark.slow
def test_weights_gathered_ahead_train_as_on_one_device():
    losses, _, _ = run("full", "data=8", "zero1")
    local = trainings.train(trainings.on_one_device(make_trainer("full")), STEPS)
    np.testing.assert_allclose(losses, [metrics["loss"] for metrics in local], rtol=5e-3)
