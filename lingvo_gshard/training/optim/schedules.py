"""Learning-rate schedules: float32 functions of the step, computed inside the graph.

Every schedule takes the step as an int32 scalar that counts from 0 and returns the learning rate
of that step. Where `warmup_steps` is w > 0, the first w steps are multiplied by (step + 1) / w.
Where `total_steps` is 0, the trainer's `steps` stand in its place.
"""

from __future__ import annotations

import math

import tensorflow as tf

from lingvo_gshard.core.config.params import Configurable, Params


class Schedule(Configurable):
    """A peak learning rate, a linear warm-up, and a decay that a subclass defines."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("learning_rate", 1e-3, "The rate that the schedule's shape multiplies.")
        p.define("warmup_steps", 0, "Steps of linear warm-up.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if not params.learning_rate > 0:
            raise ValueError(
                f"trainer.schedule.learning_rate is {params.learning_rate}; it must be positive"
            )
        if params.warmup_steps < 0:
            raise ValueError(
                f"trainer.schedule.warmup_steps is {params.warmup_steps}; 0 or more expected"
            )

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the float32 learning rate of int32 `step`."""
        step = tf.cast(step, tf.float32)
        rate = self.p.learning_rate * self.decay(step)
        if self.p.warmup_steps:
            rate *= tf.minimum(1.0, (step + 1.0) / self.p.warmup_steps)
        return rate

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the float32 factor of float32 `step`, warm-up aside."""
        raise NotImplementedError(f"{type(self).__name__} defines no decay")


class Constant(Schedule):
    """learning_rate."""

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        return tf.ones_like(step)


class InverseSquareRoot(Schedule):
    """learning_rate / sqrt(max(step, decay_start)).

    The GShard paper (A.2): learning_rate 1.0, constant for 10,000 steps and decaying from there.
    With warmup_steps = decay_start it is the schedule of Vaswani et al. 2017 (arXiv 1706.03762,
    equation 3).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.learning_rate = 1.0
        p.define("decay_start", 10_000, "The step from which the rate decays.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if params.decay_start < 1:
            raise ValueError(
                f"trainer.schedule.decay_start is {params.decay_start}; 1 or more expected"
            )

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        return tf.math.rsqrt(tf.maximum(step, float(self.p.decay_start)))


class _Bounded(Schedule):
    """A schedule that ends at `total_steps` with `final_fraction` of its rate."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("total_steps", 0, "The step at which the decay ends; 0: the trainer's steps.")
        p.define("final_fraction", 0.0, "What is left of the rate at the end.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if params.total_steps < 1:
            raise ValueError(
                f"trainer.schedule.total_steps is {params.total_steps}; 1 or more expected"
            )

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        """Returns the factor from the share of the decay that is left, 1 falling to 0."""
        raise NotImplementedError(f"{type(self).__name__} defines no shape")

    @property
    def decay_steps(self) -> int:
        """The number of steps the decay takes."""
        return max(1, self.p.total_steps - self.p.warmup_steps)

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        left = (self.p.total_steps - step) / self.decay_steps
        shape = self.shape(tf.clip_by_value(left, 0.0, 1.0))
        return self.p.final_fraction + (1.0 - self.p.final_fraction) * shape


class Linear(_Bounded):
    """Falls in a straight line from the end of the warm-up to total_steps."""

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        return left


class Cosine(_Bounded):
    """Half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5, one period)."""

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        return 0.5 * (1.0 + tf.cos(math.pi * (1.0 - left)))


class WarmupStableDecay(_Bounded):
    """Constant until the last `decay_steps` steps, then a straight line (arXiv 2404.06395, 4.1)."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("decay_share", 0.2, "Share of total_steps at the end over which the rate falls.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if not 0.0 < params.decay_share <= 1.0:
            raise ValueError(
                f"trainer.schedule.decay_share is {params.decay_share}; (0, 1] expected"
            )

    @property
    def decay_steps(self) -> int:
        return max(1, round(self.p.decay_share * self.p.total_steps))

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        return left
