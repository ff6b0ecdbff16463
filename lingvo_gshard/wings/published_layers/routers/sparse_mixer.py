"""SparseMixer: two experts, each gated by a softmax over the experts with nearly the best score."""

from __future__ import annotations

from lingvo_gshard.core import NestedMap, Params, layer_method, tf
from lingvo_gshard.layers import (
    BALANCE_LOSS,
    BalanceLoss,
    Choice,
    LinearScores,
    Router,
    TokenCapacity,
    TokenChoiceRouting,
    gate_metrics,
    selection,
)

_EXCLUDED = -float("inf")


class SparseMixerRouter(Router):
    """Sends each token to its two best experts, as Phi-3.5-MoE does.

    Liu et al. 2024 (GRIN MoE, arXiv 2409.12136, section 2). The gate of the first expert is its
    probability in a softmax over the experts whose score is at most `threshold` below the best one,
    relative to their score. The second expert's is the same among the other experts. Training there
    draws the experts from these softmaxes; here it takes the best ones, as evaluation does.
    """

    scores = LinearScores()
    balance = BalanceLoss()
    capacity = TokenCapacity()
    is_learned = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "threshold", 0.02, "Largest distance to the best score, relative to it.", minimum=0
        )
        return p

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        return 2

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        logits_GSE = self.scores.logits(theta, x_GSM)
        selected = selection.settled(self, selection.top_k(logits_GSE, 2))
        left_GSE, choices = logits_GSE, []
        for expert_GS, one_hot_GSE in selected:
            gates_GSE = self._gates(logits_GSE, left_GSE)
            gate_GS = selection.value_at(gates_GSE, one_hot_GSE)
            choices.append(Choice(expert_GS, gate_GS, mask_GS, mask_GS))
            left_GSE = tf.where(one_hot_GSE > 0, _EXCLUDED, left_GSE)
        shares_GSE = tf.nn.softmax(logits_GSE)
        counted_GSE = selection.sum_of_one_hots(selected) / 2.0
        loss = self.balance.auxiliary_loss(theta, shares_GSE, counted_GSE, mask_GS)
        losses = {BALANCE_LOSS: loss, **self.scores.losses(logits_GSE, mask_GS)}
        return self.capacity.route(choices, losses, gate_metrics(shares_GSE, mask_GS))

    def _gates(self, logits_GSE: tf.Tensor, left_GSE: tf.Tensor) -> tf.Tensor:
        """Returns the softmax over the experts that are near to the best one.

        The scores that are left are -inf at experts that were selected before.
        """
        best_GS1 = tf.reduce_max(left_GSE, -1, keepdims=True)
        distance_GSE = (best_GS1 - logits_GSE) / tf.maximum(tf.abs(logits_GSE), best_GS1)
        return tf.nn.softmax(tf.where(distance_GSE > self.p.threshold, _EXCLUDED, left_GSE))
