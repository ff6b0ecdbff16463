"""Muon: momentum whose matrices are orthogonalized, with AdamW for all other weights."""

from __future__ import annotations

import dataclasses
import math

from lingvo_gshard.core import NestedMap, Params, VariableSpec, tf
from lingvo_gshard.sharding import HARDWARE, platform_in_use, weight_patterns
from lingvo_gshard.training import (
    FIRST_MOMENT,
    OPTIMIZERS,
    Adam,
    MomentOptimizer,
    Moments,
    WeightStep,
    decayed_mean,
)
from lingvo_gshard.wings.optimizers.orthogonalization import Matrices, matrices_of, orthogonalize

MATCH_RMS_ADAMW, ORIGINAL = "match_rms_adamw", "original"
# The root mean square of Adam's updates, as a share of the learning rate (Liu et al., section 2.2).
_RMS_OF_ADAM = 0.2


@OPTIMIZERS.register("muon")
class Muon(MomentOptimizer):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

    Weight decay and the default scale are from Liu et al. 2025 (arXiv 2502.16982, equation 4):

        m = beta m + (1 - beta) g;  d = beta m + (1 - beta) g with `nesterov`, else m
        w -= learning_rate (scale orthogonalized(d) + decay w)

    `orthogonalization` has the iterations. `update_scale` chooses the scale of a matrix:

        match_rms_adamw    0.2 sqrt(max(inputs, outputs)), for learning rates of Adam (Liu et al.)
        original           sqrt(max(1, outputs / inputs)), for rates of about 0.02 (Jordan et al.)

    Matrices are the weights with the role of a matrix, two sides and no dimension V. AdamW updates
    embeddings, the softmax, biases and scales, as both sources recommend, and the weights that
    `adam_weights` matches. Routers are matrices (Liu et al., section 3.4). Experts and stacked
    layers have a matrix each.

    Attention weights [M,N,D] and [N,D,M] are one matrix over all heads, as in the code of both
    sources. With `per_head` each head of queries, keys and values has its own, as in Muon Split
    (GLM-5 team 2026, arXiv 2602.15763). On a command line:

        --gin_param='step.optimizer = @lingvo_gshard.wings.optimizers.muon.Muon'
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define_fraction("beta", 0.95, "Decay of the moment of matrices.")
        p.define("nesterov", True, "Whether matrices use Nesterov momentum.")
        p.define("iterations", 5, "Number of Newton-Schulz iterations.", minimum=1)
        p.define("epsilon", 1e-7, "Added to the norm of a matrix before the iterations.", above=0)
        p.define(
            "products_dtype",
            "",
            "Type of the iterations' products: float32 or bfloat16. Empty: bfloat16 in programs "
            "for TPUs and GPUs, float32 in others, since CPUs multiply bfloat16 more slowly.",
            choices=("", "float32", "bfloat16"),
        )
        p.define(
            "update_scale",
            MATCH_RMS_ADAMW,
            f"Scale of the updates of matrices: {MATCH_RMS_ADAMW} or {ORIGINAL}.",
            choices=(MATCH_RMS_ADAMW, ORIGINAL),
        )
        p.define("per_head", False, "Whether heads of queries, keys and values are matrices.")
        p.define("adam_weights", (), "Patterns of paths of matrices that AdamW updates.")
        p.define(
            "adam_learning_rate_factor", 1.0, "Factor of the rate of AdamW's weights.", above=0
        )
        p.define_fraction("adam_beta1", 0.9, "Decay of AdamW's first moment.")
        p.define_fraction("adam_beta2", 0.95, "Decay of AdamW's second moment.")
        p.define("adam_epsilon", 1e-8, "Added to the root of AdamW's second moment.", above=0)
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        p = params
        adam = Adam.params().set(
            beta1=p.adam_beta1,
            beta2=p.adam_beta2,
            epsilon=p.adam_epsilon,
            moment_dtype=p.moment_dtype,
            weight_decay=p.weight_decay,
            weight_decay_exclude=p.weight_decay_exclude,
        )
        self._adam = adam.instantiate()

    def check(self, specs: NestedMap) -> None:
        super().check(specs)
        weight_patterns.check("step.optimizer.adam_weights", self.p.adam_weights, specs)

    def matrices(self, spec: VariableSpec) -> Matrices | None:
        """Returns the matrices of a weight; None if AdamW updates it."""
        if any(weight_patterns.matches(pattern, spec) for pattern in self.p.adam_weights):
            return None
        return matrices_of(spec, self.p.per_head)

    def moment_layouts(self, spec: VariableSpec) -> dict[str, str]:
        if self.matrices(spec) is None:
            return self._adam.moment_layouts(spec)
        return super().moment_layouts(spec)

    def moment_dtypes(self, spec: VariableSpec) -> dict[str, str]:
        if self.matrices(spec) is None:
            return self._adam.moment_dtypes(spec)
        return super().moment_dtypes(spec)

    def shared_values(self, number: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._adam.shared_values(number)

    def update_weight(self, step: WeightStep) -> tuple[tf.Tensor, Moments]:
        matrices = self.matrices(step.spec)
        if matrices is None:
            return self._adam.update_weight(self._step_of_adam(step))
        moment = decayed_mean(self.load(step, FIRST_MOMENT), step.gradient, self.p.beta)
        moment, moments = self.store(step, FIRST_MOMENT, moment)
        change = self._change(step, matrices, moment)
        return step.commit(step.weight, step.weight - change), moments

    def change(self, step: WeightStep) -> tf.Tensor:
        matrices = self.matrices(step.spec)
        if matrices is None:
            return self._adam.change(self._step_of_adam(step))
        return self._change(step, matrices, self.load(step, FIRST_MOMENT))

    def _change(self, step: WeightStep, matrices: Matrices, moment: tf.Tensor) -> tf.Tensor:
        """Returns what to subtract from a weight, from its new moment."""
        p = self.p
        if p.nesterov:
            moment = decayed_mean(moment, step.gradient, p.beta)
        dtype = p.products_dtype or ("bfloat16" if platform_in_use() in HARDWARE else "float32")
        direction = orthogonalize(moment, matrices, p.iterations, p.epsilon, dtype)
        return self.with_decay(step, step.learning_rate * self._scale(matrices) * direction)

    def _scale(self, matrices: Matrices) -> float:
        """Returns the factor of a matrix's update."""
        inputs, outputs = matrices.size(matrices.inputs), matrices.size(matrices.outputs)
        if self.p.update_scale == ORIGINAL:
            return math.sqrt(max(1.0, outputs / inputs))
        return _RMS_OF_ADAM * math.sqrt(max(inputs, outputs))

    def _step_of_adam(self, step: WeightStep) -> WeightStep:
        rate = self.p.adam_learning_rate_factor * step.learning_rate
        return dataclasses.replace(step, learning_rate=rate)
