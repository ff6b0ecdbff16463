"""The paper's router: group-level top-2 gating (arXiv 2006.16668, Algorithm 1)."""

from __future__ import annotations

import dataclasses

from lingvo_gshard.core import NestedMap, Params, context, layer_method, tf
from lingvo_gshard.layers.moe import groups
from lingvo_gshard.layers.moe.load_metrics import BALANCE_LOSS, gate_metrics
from lingvo_gshard.layers.moe.routers import selection
from lingvo_gshard.layers.moe.routers.balance_loss import BalanceLoss
from lingvo_gshard.layers.moe.routers.capacity import TokenCapacity
from lingvo_gshard.layers.moe.routers.router import Router
from lingvo_gshard.layers.moe.routers.scores import LinearScores
from lingvo_gshard.layers.moe.routing import Choice, TokenChoiceRouting

_MODES = ("paper", "lingvo")
_SECOND_EXPERT_POLICIES = ("random", "threshold", "all")


class Top2Router(Router):
    """Sends each token to its two best experts. Experts drop tokens when their slots are full.

    All first choices get slots before any second choice. In training the second expert is used with
    probability min(1, 2 * gate). In evaluation it is always used, which is deterministic. The modes
    follow the paper and Google's code, which differ:

                            paper                          lingvo
    gates                   divided by their sum           divided by sum + 1e-9
    rejected second choice  uses a slot                    uses no slot
    auxiliary loss          mean over E of c_e / S * m_e   E^2 times that: 1 if balanced
    capacity                int(S * 2 factor / E)          rounded up to a multiple of 4
    """

    scores = LinearScores()
    balance = BalanceLoss()
    capacity = TokenCapacity()
    is_learned = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("mode", "paper", "'paper' or 'lingvo'.", choices=_MODES)
        p.define(
            "second_expert",
            "random",
            "When the second expert is used: at 'random' in training, where its gate reaches a "
            "'threshold', or for 'all' tokens.",
            choices=_SECOND_EXPERT_POLICIES,
        )
        p.define(
            "second_expert_threshold",
            0.2,
            "Smallest gate for which 'threshold' uses it.",
            minimum=0,
            maximum=1,
        )
        return p

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        return 2

    @property
    def balance_floor(self) -> float | None:
        """1, divided by E^2 in the paper's form: E terms 1/E * 1/E, and their mean over E."""
        return 1.0 if self.p.mode == "lingvo" else 1.0 / self.p.num_experts**2

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        is_lingvo = self.p.mode == "lingvo"
        logits_GSE = self.scores.logits(theta, x_GSM)
        gates_GSE = tf.nn.softmax(logits_GSE)
        selected = selection.settled(self, selection.top_k(gates_GSE, 2))
        (first_GS, first_GSE), (second_GS, second_GSE) = selected
        first_gate_GS = selection.value_at(gates_GSE, first_GSE)
        second_gate_GS = selection.value_at(gates_GSE, second_GSE)
        sum_GS = first_gate_GS + second_gate_GS + (1e-9 if is_lingvo else 0.0)
        first_gate_GS, second_gate_GS = first_gate_GS / sum_GS, second_gate_GS / sum_GS

        wants_second_GS = self._wants_second(second_gate_GS) * mask_GS
        counted_GS = wants_second_GS if is_lingvo else mask_GS
        choices = [
            Choice(first_GS, first_gate_GS, mask_GS, mask_GS),
            Choice(second_GS, second_gate_GS, wants_second_GS, counted_GS),
        ]
        loss = self.balance.auxiliary_loss(theta, gates_GSE, first_GSE, mask_GS)
        if not is_lingvo:
            loss = dataclasses.replace(loss, value=loss.value / self.p.num_experts**2)
        losses = {BALANCE_LOSS: loss, **self.scores.losses(logits_GSE, mask_GS)}
        metrics = gate_metrics(gates_GSE, mask_GS)
        return self.capacity.route(choices, losses, metrics, multiple=4 if is_lingvo else 1)

    def _wants_second(self, second_gate_GS: tf.Tensor) -> tf.Tensor:
        """Returns float32 [G,S]: 1 where the second expert is to be used, 0 elsewhere."""
        policy = self.p.second_expert
        if policy == "threshold":
            return tf.cast(second_gate_GS >= self.p.second_expert_threshold, tf.float32)
        if policy == "all" or not context.current().training:
            return tf.ones_like(second_gate_GS)
        seed = self.random_seed("second_expert")
        drawn_GS = groups.uniform(second_gate_GS.shape, seed)
        return tf.cast(2 * second_gate_GS > drawn_GS, tf.float32)
