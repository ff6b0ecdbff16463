"""Lion: updates by the sign of a running mean of gradients."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.training.step.moments import FIRST, MomentOptimizer, decayed_mean
from lingvo_gshard.training.step.optimizer import Commit, Moments


class Lion(MomentOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

        w -= learning_rate (sign(beta1 m + (1 - beta1) g) + decay w)
        m = beta2 m + (1 - beta2) g

    Every element moves by the learning rate. Choose one that is 3 to 10 times smaller than Adam's,
    and a weight decay that is 3 to 10 times larger (section 5). On a command line:

        --gin_param='step.optimizer = @lingvo_gshard.training.step.lion.Lion'
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "beta1", 0.9, "Weight of the moment in the direction of the update.", minimum=0, below=1
        )
        p.define("beta2", 0.99, "Decay of the moment.", minimum=0, below=1)
        return p

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
        p = self.p
        old = self.load(spec, moments, FIRST)
        change = self._change(spec, old, weight, gradient, learning_rate)
        new = decayed_mean(old, gradient, p.beta2)
        _, moments = self.store(spec, moments, FIRST, new, step, commit)
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
        p = self.p
        new = self.load(spec, moments, FIRST)
        old = (new - (1.0 - p.beta2) * gradient) / p.beta2
        return self._change(spec, old, weight, gradient, learning_rate)

    def _change(
        self,
        spec: VariableSpec,
        old: tf.Tensor,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tf.Tensor:
        """Returns what to subtract from a weight, from its moment before the step."""
        direction = tf.sign(self.p.beta1 * old + (1.0 - self.p.beta1) * gradient)
        return self.with_decay(spec, learning_rate * direction, weight, learning_rate)
