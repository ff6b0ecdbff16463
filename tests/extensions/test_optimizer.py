# tests: training/step/optimizer.py
"""Tests that one class adds an optimizer that gin selects, trains, and can be sharded."""

import numpy as np
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.runtime import SingleDeviceRuntime, SpmdRuntime, devices_for
from lingvo_gshard.sharding import Partitioning
from lingvo_gshard.training import Optimizer, Trainer
from lingvo_gshard.wings.gin.binding import apply_gin
from tests import tiny

STEPS = 12


class RootMeanSquare(Optimizer):
    """Divides the gradient by the root of a running mean of its square."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("decay", 0.9, "Decay of the running mean.")
        return p

    def moment_layouts(self, spec):
        return {"square": spec.layout}

    def update_weight(self, step):
        old = step.moments["square"]
        square = step.commit(old, self.p.decay * old + (1.0 - self.p.decay) * step.gradient**2)
        change = step.learning_rate * step.gradient * tf.math.rsqrt(square + 1e-6)
        return step.commit(step.weight, step.weight - change), {"square": square}


class RootMeanSquareTest(testing.OptimizerTest):
    PARAMS = RootMeanSquare.params()


def make_trainer() -> Trainer:
    settings = [
        f"step.optimizer = @{__name__}.RootMeanSquare",
        "step.optimizer.decay = 0.8",
        "step.schedule.learning_rate = 0.01",
    ]
    p = apply_gin(tiny.experiment_params(STEPS), [], settings)
    return p.step.instantiate(p.task, p.run.steps)


def train(runtime) -> list[float]:
    runtime.init_state()
    return [runtime.train_step(tiny.make_batch(1, i)).read()["loss"] for i in range(STEPS)]


def test_a_new_optimizer_trains():
    trainer = make_trainer()
    assert type(trainer.optimizer).__name__ == "RootMeanSquare" and trainer.optimizer.p.decay == 0.8
    losses = train(SingleDeviceRuntime(trainer))
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_sharding_does_not_change_it():
    partitioning = Partitioning.make("data=2", "fsdp")
    sharded = SpmdRuntime(make_trainer(), partitioning, devices_for(2))
    np.testing.assert_allclose(
        train(sharded), train(SingleDeviceRuntime(make_trainer())), rtol=1e-5
    )
    weight, moment = sharded.state().theta.hidden.w, sharded.state().moments.hidden.w.square
    assert moment.sharding == weight.sharding and not moment.sharding.is_fully_replicated
