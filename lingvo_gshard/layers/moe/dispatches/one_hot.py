"""Einsum dispatch: products with a one-hot [G,S,E,C], as in arXiv 2006.16668, Algorithm 2."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.layers.moe.dispatches.buffers import BufferDispatch
from lingvo_gshard.sharding import einsum


class EinsumDispatch(BufferDispatch):
    """The paper's one-hot einsums."""

    def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the experts' inputs [G,E,C,M]; empty slots are zero."""
        kept = [tf.cast(choice.kept_GS, tf.float32) for choice in self._routing.choices]
        return einsum("GSEC,GSM->GECM", self._weighted_slots(kept), x_GSM)

    def combine(self, y_GECM: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,M]: each token's sum of expert outputs times gates."""
        gates = [choice.gate_GS for choice in self._routing.choices]
        return einsum("GSEC,GECM->GSM", self._weighted_slots(gates), y_GECM)

    def _weighted_slots(self, weights: list[tf.Tensor]) -> tf.Tensor:
        """Returns [G,S,E,C]: the weight of each choice at its token and slot, 0 elsewhere."""
        routing = self._routing
        slots_GSEC = tf.add_n(
            [
                einsum(
                    "GSE,GSC->GSEC",
                    tf.one_hot(choice.expert_GS, routing.num_experts) * weight_GS[..., None],
                    tf.one_hot(choice.position_GS, routing.capacity),
                )
                for choice, weight_GS in zip(routing.choices, weights, strict=True)
            ]
        )
        return tf.cast(slots_GSEC, self._dtype)
