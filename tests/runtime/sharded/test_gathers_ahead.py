# tests: layers/stacks/loop.py, training/step/gradients.py
"""Compares loops that gather weights one layer ahead with those that gather all weights before."""

from unittest import mock

import numpy as np
import pytest

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training.step.gradients import Gradients
from lingvo_gshard.training.step.trainer import Trainer
from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation

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
    partitioning = Partitioning.make(mesh, strategy)
    runtime = SpmdRuntime(
        make_trainer(policy, precision), partitioning, devices_for(partitioning.mesh.size)
    )
    runtime.init_state()
    losses = [runtime.train_step(tiny_translation.batch(i)).read()["loss"] for i in range(STEPS)]
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
    for (path, own), other in zip(theta.flatten_items(), expected.flatten(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5, err_msg=path)
    more = len(gathered_in_loops(calls)) - len(gathered_in_loops(calls_before))
    # Four weights of attention and two of the feed-forward layer; the decoder has cross-attention.
    assert more == 16


@pytest.mark.slow
def test_weights_gathered_ahead_train_as_on_one_device():
    losses, _, _ = run("full", "data=8", "zero1")
    local = SingleDeviceRuntime(make_trainer("full"))
    local.init_state()
    for index, loss in enumerate(losses):
        one = local.train_step(tiny_translation.batch(index)).read()["loss"]
        np.testing.assert_allclose(loss, one, rtol=5e-3)
