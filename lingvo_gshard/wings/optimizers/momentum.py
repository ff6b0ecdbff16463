"""Stochastic gradient descent: plain, with momentum, or with Nesterov momentum."""

from __future__ import annotations

from lingvo_gshard.core import Params, tf
from lingvo_gshard.training import FIRST_MOMENT, MomentOptimizer, Moments, WeightStep


class Momentum(MomentOptimizer):
    """Gradient descent with momentum (Polyak 1964, doi 10.1016/0041-5553(64)90137-5).

        m = beta m + g;  w -= learning_rate (m + decay w)

    With `nesterov` the weight moves by g + beta m instead of m (Sutskever et al. 2013,
    https://proceedings.mlr.press/v28/sutskever13.html, equations 3 and 4, with the look-ahead point
    as the weight). With beta 0 this is plain gradient descent without moments. On a command line:

        --gin_param='step.optimizer = @lingvo_gshard.wings.optimizers.momentum.Momentum'
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define_fraction("beta", 0.9, "Decay of the moment.")
        p.define("nesterov", False, "Whether to use Nesterov momentum.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self.moment_names = (FIRST_MOMENT,) if params.beta else ()

    def update_weight(self, step: WeightStep) -> tuple[tf.Tensor, Moments]:
        beta, moment, moments = self.p.beta, step.gradient, step.moments
        if beta:
            moment = beta * self.load(step, FIRST_MOMENT) + step.gradient
            moment, moments = self.store(step, FIRST_MOMENT, moment)
        change = self._change(step, moment)
        return step.commit(step.weight, step.weight - change), moments

    def change(self, step: WeightStep) -> tf.Tensor:
        return self._change(step, self.load(step, FIRST_MOMENT) if self.p.beta else step.gradient)

    def _change(self, step: WeightStep, moment: tf.Tensor) -> tf.Tensor:
        """Returns what to subtract from a weight, from its new moment."""
        if self.p.beta and self.p.nesterov:
            moment = step.gradient + self.p.beta * moment
        return self.with_decay(step, step.learning_rate * moment)
