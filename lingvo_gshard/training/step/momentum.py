"""Stochastic gradient descent: plain, with momentum, or with Nesterov momentum."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.training.step.moments import FIRST, MomentOptimizer
from lingvo_gshard.training.step.optimizer import Commit, Moments


class Momentum(MomentOptimizer):
    """Gradient descent with momentum (Polyak 1964, doi 10.1016/0041-5553(64)90137-5).

        m = beta m + g;  w -= learning_rate (m + decay w)

    With `nesterov` the weight moves by g + beta m instead of m (Sutskever et al. 2013,
    https://proceedings.mlr.press/v28/sutskever13.html, equations 3 and 4, with the look-ahead point
    as the weight). With beta 0 this is plain gradient descent without moments. On a command line:

        --gin_param='step.optimizer = @lingvo_gshard.training.step.momentum.Momentum'
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("beta", 0.9, "Decay of the moment.", minimum=0, below=1)
        p.define("nesterov", False, "Whether to use Nesterov momentum.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        self.moment_names = (FIRST,) if params.beta else ()

    def update_weight(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        moments: Moments,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        commit: Commit,
    ) -> tuple[tf.Tensor, Moments]:
        beta, moment = self.p.beta, gradient
        if beta:
            moment = beta * self.load(spec, moments, FIRST) + gradient
            moment, moments = self.store(spec, moments, FIRST, moment, step, commit)
        change = self._change(spec, weight, gradient, moment, learning_rate)
        return commit(weight, weight - change), moments

    def change(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        moments: Moments,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tf.Tensor:
        moment = self.load(spec, moments, FIRST) if self.p.beta else gradient
        return self._change(spec, weight, gradient, moment, learning_rate)

    def _change(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        moment: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tf.Tensor:
        """Returns what to subtract from a weight, from its new moment."""
        if self.p.beta and self.p.nesterov:
            moment = gradient + self.p.beta * moment
        return self.with_decay(spec, learning_rate * moment, weight, learning_rate)
