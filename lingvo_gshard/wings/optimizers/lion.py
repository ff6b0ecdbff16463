"""Lion: updates by the sign of a running mean of gradients."""

from __future__ import annotations

from lingvo_gshard.core import Params, tf
from lingvo_gshard.training import FIRST_MOMENT, MomentOptimizer, Moments, WeightStep, decayed_mean


class Lion(MomentOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2).

        w -= learning_rate (sign(beta1 m + (1 - beta1) g) + decay w)
        m = beta2 m + (1 - beta2) g

    Every element moves by the learning rate. Choose one that is 3 to 10 times smaller than Adam's,
    and a weight decay that is 3 to 10 times larger (section 5). On a command line:

        --gin_param='step.optimizer = @lingvo_gshard.wings.optimizers.lion.Lion'
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define_fraction("beta1", 0.9, "Weight of the moment in the direction of the update.")
        p.define_fraction("beta2", 0.99, "Decay of the moment.")
        return p

    def update_weight(self, step: WeightStep) -> tuple[tf.Tensor, Moments]:
        p = self.p
        old = self.load(step, FIRST_MOMENT)
        change = self._change(step, old)
        new = decayed_mean(old, step.gradient, p.beta2)
        _, moments = self.store(step, FIRST_MOMENT, new)
        return step.commit(step.weight, step.weight - change), moments

    def change(self, step: WeightStep) -> tf.Tensor:
        p = self.p
        new = self.load(step, FIRST_MOMENT)
        old = (new - (1.0 - p.beta2) * step.gradient) / p.beta2
        return self._change(step, old)

    def _change(self, step: WeightStep, old: tf.Tensor) -> tf.Tensor:
        """Returns what to subtract from a weight, from its moment before the step."""
        direction = tf.sign(self.p.beta1 * old + (1.0 - self.p.beta1) * step.gradient)
        return self.with_decay(step, step.learning_rate * direction)
