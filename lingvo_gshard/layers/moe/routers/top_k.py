"""Top-k: each token goes to the k experts with the largest gates."""

from __future__ import annotations

from lingvo_gshard.core import NestedMap, Params, layer_method, tf
from lingvo_gshard.layers.moe.load_metrics import BALANCE_LOSS, gate_metrics
from lingvo_gshard.layers.moe.routers.balance_loss import BalanceLoss
from lingvo_gshard.layers.moe.routers.capacity import TokenCapacity
from lingvo_gshard.layers.moe.routers.router import Router
from lingvo_gshard.layers.moe.routers.scores import LinearScores
from lingvo_gshard.layers.moe.routers.selection import (
    TopK,
    settled,
    sum_of_one_hots,
    top_1,
    value_at,
)
from lingvo_gshard.layers.moe.routing import Choice, TokenChoiceRouting


class TopKRouter(Router):
    """Sends each token to its k best experts. First choices get slots before second choices.

    The gate is the expert's probability in a softmax over all experts (Dai et al. 2024, arXiv
    2401.06066, section 2). With `normalize` the softmax is over the k selected experts only
    (Shazeer et al. 2017, arXiv 1701.06538, section 2.1; Mixtral, arXiv 2401.04088, section 2.1).
    In the auxiliary loss each choice counts for 1/k of a token, so that balanced loads give 1.

    For a second choice that depends on its gate use Top2Router's `second_expert`.
    """

    scores = LinearScores()
    selection = TopK()
    balance = BalanceLoss()
    capacity = TokenCapacity()
    experts_per_token_option = "k"
    is_learned = True

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        logits_GSE = self.scores.logits(theta, x_GSM)
        gates_GSE = tf.nn.softmax(logits_GSE)
        selected = self.selection.select(gates_GSE)
        gates = self.selection.gates(gates_GSE, selected)
        choices = [
            Choice(expert_GS, gate_GS, mask_GS, mask_GS)
            for (expert_GS, _), gate_GS in zip(selected, gates, strict=True)
        ]
        counted_GSE = sum_of_one_hots(selected) / self.p.k
        loss = self.balance.auxiliary_loss(theta, gates_GSE, counted_GSE, mask_GS)
        losses = {BALANCE_LOSS: loss, **self.scores.losses(logits_GSE, mask_GS)}
        return self.capacity.route(choices, losses, gate_metrics(gates_GSE, mask_GS))


class SwitchRouter(Router):
    """Sends each token to its best expert; the gate is the expert's softmax probability.

    Section 2.1 and equations 1 to 4 of the paper, with its jitter and capacity factor. With a
    dropless dispatch set capacity_factor to 0.
    """

    scores = LinearScores()
    balance = BalanceLoss()
    capacity = TokenCapacity()
    is_learned = True

    @classmethod
    def params(cls) -> Params:
        return super().params().set(jitter=1e-2, capacity_factor=1.25)

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        return 1

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        logits_GSE = self.scores.logits(theta, x_GSM)
        gates_GSE = tf.nn.softmax(logits_GSE)
        ((expert_GS, chosen_GSE),) = settled(self, [top_1(gates_GSE)])
        choice = Choice(expert_GS, value_at(gates_GSE, chosen_GSE), mask_GS, mask_GS)
        loss = self.balance.auxiliary_loss(theta, gates_GSE, chosen_GSE, mask_GS)
        losses = {BALANCE_LOSS: loss, **self.scores.losses(logits_GSE, mask_GS)}
        return self.capacity.route([choice], losses, gate_metrics(gates_GSE, mask_GS))
