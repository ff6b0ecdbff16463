"""Learning-rate schedules: functions of the step, computed in the graph in float32."""

from __future__ import annotations

import math

from lingvo_gshard.core import Configurable, Params, UserError, tf


class Schedule(Configurable):
    """A peak learning rate, a linear warm-up, and a decay that a subclass defines.

    With `warmup_steps` w > 0 the rate of the first w steps is multiplied by (step + 1) / w.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("learning_rate", 1e-3, "The peak rate, which the decay multiplies.", above=0)
        p.define("warmup_steps", 0, "Number of steps of linear warm-up.", minimum=0)
        return p

    @classmethod
    def for_run(cls, params: Params, steps: int) -> Params:
        """Returns the schedule's Params for a run of so many steps."""
        del steps
        return params

    @classmethod
    def ends_with_run(cls, params: Params) -> bool:
        """Returns whether a change of the run's number of steps changes the schedule."""
        del params
        return False

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the float32 learning rate of an int32 step, which counts from 0."""
        step = tf.cast(step, tf.float32)
        rate = self.p.learning_rate * self.decay(step)
        if self.p.warmup_steps:
            rate *= tf.minimum(1.0, (step + 1.0) / self.p.warmup_steps)
        return rate

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the float32 factor of a float32 step, without the warm-up."""
        raise NotImplementedError(f"{type(self).__name__} defines no decay")


class Constant(Schedule):
    """A constant rate after the warm-up."""

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        return tf.ones_like(step)


class InverseSquareRoot(Schedule):
    """Decays as learning_rate / sqrt(max(step, decay_start)).

    The defaults come from the GShard paper, A.2: learning rate 1.0 and decay_start 10,000. With
    warmup_steps = decay_start this is the schedule of Vaswani et al. 2017 (arXiv 1706.03762,
    equation 3).
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.learning_rate = 1.0
        p.define("decay_start", 10_000, "The step from which the rate decays.", minimum=1)
        return p

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        return tf.math.rsqrt(tf.maximum(step, float(self.p.decay_start)))


class BoundedSchedule(Schedule):
    """A decay that ends at `total_steps` with `final_fraction` of the peak rate."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "total_steps", 0, "The step at which the decay ends; 0: the run's last.", minimum=0
        )
        p.define(
            "final_fraction", 0.0, "Share of the rate that stays at the end.", minimum=0, maximum=1
        )
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        if params.total_steps < 1:
            raise UserError(
                f"step.schedule.total_steps is {params.total_steps}; 1 or more expected"
            )

    @classmethod
    def for_run(cls, params: Params, steps: int) -> Params:
        if params.total_steps:
            return params
        return params.copy().set(total_steps=steps)

    @classmethod
    def ends_with_run(cls, params: Params) -> bool:
        return not params.total_steps

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        """Returns the factor, 1 falling to 0, when the share `left` of the decay is to come."""
        raise NotImplementedError(f"{type(self).__name__} defines no shape")

    @property
    def decay_steps(self) -> int:
        """Number of steps from the start of the decay to its end."""
        return max(1, self.p.total_steps - self.p.warmup_steps)

    def decay(self, step: tf.Tensor) -> tf.Tensor:
        left = (self.p.total_steps - step) / self.decay_steps
        shape = self.shape(tf.clip_by_value(left, 0.0, 1.0))
        return self.p.final_fraction + (1.0 - self.p.final_fraction) * shape


class Linear(BoundedSchedule):
    """Decays linearly from the end of the warm-up to total_steps."""

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        return left


class Cosine(BoundedSchedule):
    """Decays along half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5).

    The factor (1 + cos(pi (1 - left))) / 2 is computed as a square, which does not cancel near 0.
    """

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        return tf.square(tf.sin(0.5 * math.pi * left))


class WarmupStableDecay(BoundedSchedule):
    """Constant, then linear in the last `decay_share` of the steps (arXiv 2404.06395, 4.1)."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "decay_share", 0.2, "Share of total_steps with decay, at their end.", above=0, maximum=1
        )
        return p

    @property
    def decay_steps(self) -> int:
        return max(1, round(self.p.decay_share * self.p.total_steps))

    def shape(self, left: tf.Tensor) -> tf.Tensor:
        return left
