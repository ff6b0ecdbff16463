# tests: wings/kernels/kernel.py, runtime/spmd.py, wings/local_updates/runtime.py
# tests: sharding/platforms.py
"""Tests that runtimes of meshes use the kernels of their devices' platform in training steps."""

from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.runtime import spmd
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.wings.local_updates import runtime as local_updates
from tests import tiny

B, L, V = 8, 128, 16
USED = "the platform's kernel computes the attention of decoder.layers[0].self_attention"


def make_trainer(every):
    p = tiny.experiment_params()
    p.task = LanguageModelTask.params().set(vocabulary_size=V, model_dim=16)
    p.task.decoder.set(num_layers=1, num_heads=2, hidden_dim=16, moe_every=0)
    p.step.local_updates.every = every
    return p.step.instantiate(p.task, p.run.steps)


def make_batch():
    generator = np.random.default_rng(3)
    segments = np.sort(generator.integers(0, 3, (B, L)), 1)[:, ::-1].astype(np.int32)
    ids = [generator.integers(0, V, (B, L)).astype(np.int32) for _ in range(2)]
    positions = np.tile(np.arange(L, dtype=np.int32), (B, 1))
    names = ("target_inputs", "target_labels", "target_positions", "target_segments")
    return dict(zip(names, (*ids, positions, segments), strict=True))


RUNTIMES = {
    "spmd": (spmd.SpmdRuntime, "data=4", 0),
    "local_updates": (local_updates.LocalUpdatesRuntime, "worker=2,data=2", 2),
}


class RuntimesTest(testing.TestCase, parameterized.TestCase):
    def train(self, kind, platform):
        """Returns the weights after two steps on devices of a platform, and the messages."""
        make, mesh, every = RUNTIMES[kind]
        with (
            mock.patch.object(spmd, "platform_of", return_value=platform),
            mock.patch.object(local_updates, "platform_of", return_value=platform),
        ):
            partitioning = Partitioning.make(mesh, "data")
            runtime = make(make_trainer(every), partitioning, devices_for(4))
        runtime.init_state()
        for _ in range(2):
            loss = runtime.train_step(make_batch()).read()["loss"]
        return runtime.theta_on_host(), loss, runtime.pop_messages()

    @parameterized.parameters(*RUNTIMES)
    @pytest.mark.slow
    def test_a_step_with_kernels_trains_as_without(self, kind):
        theta, loss, messages = self.train(kind, "tpu_interpreted")
        expected, expected_loss, plain_messages = self.train(kind, "cpu")
        self.assertIn(USED, messages)
        self.assertNotIn(USED, plain_messages)
        self.assertAllClose(loss, expected_loss, rtol=0, atol=1e-5)
        self.assertAllClose(theta, expected, rtol=0, atol=1e-4)


if __name__ == "__main__":
    testing.main()
