"""Adam, optionally with decoupled weight decay (AdamW) and narrow moments."""

from __future__ import annotations

from lingvo_gshard.core import OPTIMIZER_SCOPE, Params, tf
from lingvo_gshard.training.step import moments
from lingvo_gshard.training.step.optimizer import Moments, WeightStep

# Shared values of a step: 1 - beta1^t, and 1 / sqrt(1 - beta2^t).
_FIRST_CORRECTION, _ROOT_SCALE = "first_correction", "root_scale"


class Adam(moments.MomentOptimizer):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980, algorithm 1 in the form of section 2).

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        w -= learning_rate (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay w)

    The weight decay is decoupled, as in AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101,
    algorithm 2).
    """

    moment_names = (moments.FIRST_MOMENT, moments.SECOND_MOMENT)

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define_fraction("beta1", 0.9, "Decay of the first moment.")
        p.define_fraction("beta2", 0.98, "Decay of the second moment.")
        p.define("epsilon", 1e-9, "Added to the root of the second moment.", above=0)
        return p

    def shared_values(self, number: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.name_scope(f"{OPTIMIZER_SCOPE}/"):
            second = moments.bias_correction(self.p.beta2, number)
            return {
                _FIRST_CORRECTION: moments.bias_correction(self.p.beta1, number),
                _ROOT_SCALE: tf.math.rsqrt(second),
            }

    def update_weight(self, step: WeightStep) -> tuple[tf.Tensor, Moments]:
        p = self.p
        old_first, old_second = (self.load(step, name) for name in self.moment_names)
        first = moments.decayed_mean(old_first, step.gradient, p.beta1)
        first, first_moments = self.store(step, moments.FIRST_MOMENT, first)
        second = moments.decayed_mean(old_second, step.gradient * step.gradient, p.beta2)
        second, second_moments = self.store(step, moments.SECOND_MOMENT, second)
        change = self._change(step, first, second)
        return step.commit(step.weight, step.weight - change), first_moments | second_moments

    def change(self, step: WeightStep) -> tf.Tensor:
        first, second = (self.load(step, name) for name in self.moment_names)
        return self._change(step, first, second)

    def _change(self, step: WeightStep, first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        """Returns what to subtract from a weight, from its new moments."""
        p = self.p
        # Scalars are combined first, so that an element costs one root and one division.
        scale = step.learning_rate / step.shared[_FIRST_CORRECTION]
        change = scale * first / (tf.sqrt(second) * step.shared[_ROOT_SCALE] + p.epsilon)
        return self.with_decay(step, change)
