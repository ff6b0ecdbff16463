"""Adam, with decoupled weight decay (AdamW) where asked for."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.params import Params
from lingvo_gshard.training.optimizers import Keep, Optimizer, Slots


class Adam(Optimizer):
    """Kingma and Ba 2015 (arXiv 1412.6980), algorithm 1, in the form of its section 2:

        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        w -= learning_rate (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay w)

    The decay is decoupled (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2) and touches
    only weights of two dimensions or more, so neither biases nor the scales of norms.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("beta1", 0.9, "Decay of the first moment.")
        p.define("beta2", 0.98, "Decay of the second moment.")
        p.define("epsilon", 1e-9, "Added to the root of the second moment.")
        p.define("weight_decay", 0.0, "Decoupled decay of matrices, per unit of learning rate.")
        return p

    def __init__(self, params: Params):
        super().__init__(params)
        for name in ("beta1", "beta2"):
            if not 0.0 <= params.get(name) < 1.0:
                raise ValueError(
                    f"trainer.optimizer.{name} is {params.get(name)}; it must be in [0, 1)"
                )

    def slot_layouts(self, spec: VariableSpec) -> dict[str, str]:
        return {"first_moment": spec.layout, "second_moment": spec.layout}

    def update_weight(
        self,
        spec: VariableSpec,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
        keep: Keep,
    ) -> tuple[tf.Tensor, Slots]:
        p = self.p
        t = tf.cast(step, tf.float32) + 1.0
        old_first, old_second = slots["first_moment"], slots["second_moment"]
        first = keep(old_first, p.beta1 * old_first + (1.0 - p.beta1) * gradient)
        square = gradient * gradient
        second = keep(old_second, p.beta2 * old_second + (1.0 - p.beta2) * square)
        # Scalars are folded together first, so that each weight costs one root and one division.
        scale = learning_rate / (1.0 - tf.pow(p.beta1, t))
        root_scale = tf.math.rsqrt(1.0 - tf.pow(p.beta2, t))
        change = scale * first / (tf.sqrt(second) * root_scale + p.epsilon)
        if p.weight_decay and len(spec.layout) > 1:
            change += learning_rate * p.weight_decay * weight
        return keep(weight, weight - change), {"first_moment": first, "second_moment": second}
