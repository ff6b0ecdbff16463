# tests: training/step/precision.py
"""Shows how far weights in bfloat16 differ on a mesh: as far as by one bit of the first weights.

Another mesh adds in another order. In float32 five steps then differ by less than 1e-4 of a
tensor's largest weight. In bfloat16 a weight that is rounded the other way moves the next step's
gradients, and Adam's first steps turn with the signs of small ones: biases, which begin at zero,
may differ by half of their largest value. A fault of the mesh would exceed what weights that are
changed by one bit differ by on one device.
"""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Constant
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.published_layers.routers import SinkhornRouter
from tests.runtime import tiny_translation

pytestmark = pytest.mark.slow

STEPS, NUDGES = 5, 4


def make_trainer(precision: str) -> Trainer:
    """Returns a trainer with Sinkhorn's dropless experts in the encoder."""
    task = TranslationTask.params().set(
        source_vocabulary_size=32, target_vocabulary_size=32, model_dim=16
    )
    task.encoder.set(num_layers=2, num_heads=4, hidden_dim=16, moe_every=2)
    task.decoder.set(num_layers=1, num_heads=4, hidden_dim=16, moe_every=0)
    task.encoder.moe.set(
        num_experts=4,
        group_size=12,
        dispatch=DroplessDispatch.params(),
        router=SinkhornRouter.params().set(capacity_factor=0.0),
    )
    params = Trainer.params().set(
        clip_norm=1.0,
        optimizer=Adam.params(),
        schedule=Constant.params().set(learning_rate=0.01),
        precision=precision,
    )
    return params.instantiate(task)


def trained(runtime, start):
    """Returns the state after some steps, as NumPy arrays."""
    runtime.load_state(start)
    for step in range(STEPS):
        runtime.train_step(tiny_translation.batch(step)).read()
    return runtime.state().transform(np.asarray)


def difference(one, other, part: str) -> float:
    """Returns the largest difference of a part of two states, by each tensor's largest value."""
    found = [0.0]
    for mine, theirs in zip(one[part].flatten(), other[part].flatten(), strict=True):
        mine, theirs = (np.asarray(x, np.float64) for x in (mine, theirs))
        if mine.size and np.abs(mine).max():
            found.append(np.abs(mine - theirs).max() / np.abs(mine).max())
    return max(found)


def nudged(start, seed: int):
    """Returns a state with weights changed by at most one unit in the last place."""
    rng = np.random.default_rng(seed)

    def nudge(weight):
        weight = np.asarray(weight)
        unit = 2.0**-23 if weight.dtype == np.float32 else 2.0**-8
        change = 1 + unit * rng.choice([-1, 0, 1], weight.shape)
        return (weight.astype(np.float64) * change).astype(weight.dtype)

    changed = type(start)(start)
    changed["theta"] = start.theta.transform(nudge)
    return changed


@pytest.mark.parametrize("precision", ["float32", "bfloat16_weights"])
def test_a_mesh_differs_no_more_than_a_bit_of_the_weights(precision):
    local = SingleDeviceRuntime(make_trainer(precision))
    local.init_state()
    start = tf.nest.map_structure(np.asarray, local.state())
    alone = trained(local, start)
    partitioning = Partitioning.make("data=2,model=2", "expert_sequence_tensor")
    split = SpmdRuntime(make_trainer(precision), partitioning, devices_for(4))
    on_mesh = trained(split, start)
    others = [trained(local, nudged(start, seed)) for seed in range(NUDGES)]
    for part in ("theta", "moments"):
        bound = max(difference(alone, other, part) for other in others)
        found = difference(alone, on_mesh, part)
        assert found < 2 * bound
        assert (bound < 1e-4) == (precision == "float32"), (part, bound)
