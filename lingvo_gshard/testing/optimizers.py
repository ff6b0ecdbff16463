"""OptimizerTest: what the library holds every optimizer to."""

from __future__ import annotations

import unittest
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from lingvo_gshard.core import NestedMap, Params, context, initializers, layer_method
from lingvo_gshard.layers import FeedForward
from lingvo_gshard.runtime import SingleDeviceRuntime, SpmdRuntime, devices_for
from lingvo_gshard.sharding import Partitioning, annotate
from lingvo_gshard.tasks import Task
from lingvo_gshard.testing import passes
from lingvo_gshard.testing.test_case import TestCase
from lingvo_gshard.training import Linear, Trainer

_B, _L, _M, _H, _STEPS = 8, 4, 6, 12, 20


class _Regression(Task):
    """A feed-forward layer that learns a fixed function."""

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        layer = FeedForward.params().set(model_dim=_M, hidden_dim=_H)
        self.create_child("layer", layer)
        zeros = initializers.constant(0.0)
        self.create_variable("offset", "M", {"M": _M}, zeros)

    @layer_method
    def loss(self, theta: NestedMap, batch: Any) -> tuple[tf.Tensor, NestedMap]:
        """Returns the mean squared error and no metrics."""
        x_BLM = annotate(batch["x"], "BLM")
        y_BLM = self.layer.fprop(theta.layer, x_BLM, tf.ones([_B, _L])) + theta.offset
        return tf.reduce_mean(tf.square(y_BLM - batch["y"])), NestedMap()


def _batch(index: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(index).normal(size=(_B, _L, _M)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[..., ::-1]).astype(np.float32)}


class OptimizerTest(TestCase):
    """Tests an optimizer by the rules for all optimizers of the library.

    Class attributes:
      PARAMS: Params of the optimizer.
      LEARNING_RATE: a learning rate that reduces the loss within 20 steps.
      STRATEGIES: pairs (strategy, mesh) that partition the training.
    """

    PARAMS: ClassVar[Params | None] = None
    LEARNING_RATE: ClassVar[float] = 0.01
    STRATEGIES: ClassVar[tuple[tuple[str, str], ...]] = (
        ("zero1", "data=2"),
        ("fsdp", "data=2"),
        ("fsdp_tensor", "data=2,model=2"),
    )

    @classmethod
    def setUpClass(cls) -> None:
        """Skips classes that are not for one optimizer."""
        if cls.PARAMS is None:
            raise unittest.SkipTest("PARAMS names the optimizer to test")
        super().setUpClass()

    def make_trainer(self) -> Trainer:
        """Returns a trainer of a small regression with the optimizer."""
        assert self.PARAMS is not None
        schedule = Linear.params().set(learning_rate=self.LEARNING_RATE, warmup_steps=0)
        step = Trainer.params().set(optimizer=self.PARAMS.copy(), schedule=schedule)
        return step.instantiate(_Regression.params(), _STEPS)

    def train(self, runtime: Any, steps: int = _STEPS, first: int = 0) -> list[float]:
        """Returns the losses of some steps."""
        batches = (_batch(index) for index in range(first, first + steps))
        return [runtime.train_step(batch).read()["loss"] for batch in batches]

    def started(self, runtime: Any) -> Any:
        """Returns the runtime with initial weights."""
        runtime.init_state()
        return runtime

    def test_it_learns(self) -> None:
        """The loss falls."""
        losses = self.train(self.started(SingleDeviceRuntime(self.make_trainer())))
        self.assertLess(np.mean(losses[-5:]), np.mean(losses[:5]))

    def test_compiled_it_computes_what_it_computes_eagerly(self) -> None:
        """One step of the trainer, with and without XLA."""
        trainer = self.make_trainer()
        state = trainer.init_state()
        batch = {name: tf.constant(value) for name, value in _batch(0).items()}
        with context.scope(training=True, seed=tf.constant([1, 0])):
            expected, _ = trainer.train_step(state, batch)
        compiled = tf.function(trainer.train_step, jit_compile=True, autograph=False)
        found, _ = compiled(state, batch)
        self.assertAllClose(found.theta, expected.theta, rtol=1e-4, atol=1e-5)
        self.assertAllClose(found.moments, expected.moments, rtol=1e-4, atol=1e-5)

    def test_sharding_does_not_change_it(self) -> None:
        """Losses under each of STRATEGIES; moments are split like their weights or more."""
        expected = self.train(self.started(SingleDeviceRuntime(self.make_trainer())))
        for strategy, mesh in self.STRATEGIES:
            with passes.noted(f"with {strategy=} and {mesh=}"):
                partitioning = Partitioning.make(mesh, strategy)
                devices = devices_for(partitioning.mesh.size)
                sharded = self.started(SpmdRuntime(self.make_trainer(), partitioning, devices))
                self.assertAllClose(self.train(sharded), expected, rtol=1e-4, atol=1e-5)

    def test_it_goes_on_from_a_saved_state_to_the_bit(self) -> None:
        """Steps from a saved state equal the steps of a run that was not interrupted."""
        whole = self.started(SingleDeviceRuntime(self.make_trainer()))
        self.train(whole, 4)
        saved = whole.state()
        expected = self.train(whole, 4, first=4)
        resumed = SingleDeviceRuntime(self.make_trainer())
        resumed.load_state(saved)
        self.assertEqual(self.train(resumed, 4, first=4), expected)

    def test_a_step_that_must_not_change_the_state_changes_nothing(self) -> None:
        """In a skipped step, weights and moments stay as they are."""
        trainer = self.make_trainer()
        state, specs = trainer.init_state(), trainer.theta_specs
        ones = state.theta.transform(tf.ones_like)
        step, rate = tf.constant(3), tf.constant(0.1)
        theta, moments = trainer.optimizer.update(
            specs, state.theta, ones, state.moments, step, rate, tf.constant(True)
        )
        self.assertAllClose(theta, state.theta, rtol=0.0, atol=0.0)
        self.assertAllClose(moments, state.moments, rtol=0.0, atol=0.0)
