"""Sigmoid gates, balanced by a selection bias instead of a loss (arXiv 2412.19437)."""

from __future__ import annotations

import functools

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.load_metrics import gate_entropy
from lingvo_gshard.layers.moe.routers import balance_loss, group_limited, selection
from lingvo_gshard.layers.moe.routers.router import LinearTokenChoiceRouter
from lingvo_gshard.layers.moe.routing import Choice, TokenChoiceRouting, WeightedLoss

# Keeps gates finite if all scores underflow to 0 in float32.
_TINY = 1e-20


class SigmoidRouter(LinearTokenChoiceRouter):
    """Sends each token to the k experts with the largest sigmoid(logit) + selection_bias.

    DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Gates are the sigmoids, without
    the bias. After each step the bias decreases for experts with more than the mean load and
    increases for those with less (Wang et al. 2024, arXiv 2408.15664, Algorithm 1). It has no
    gradient, and no optimizer updates it.

    The auxiliary loss is the complementary loss of DeepSeek-V3 (equations 17 to 20). It is computed
    per group of tokens; the paper computes it per sequence.
    """

    experts_per_token_option = "k"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("k", 2, "Number of experts per token.", minimum=1)
        p.define("normalize", True, "Whether to divide a token's scores by their sum.")
        p.define("scale", 1.0, "Factor of the gates, after normalization.", minimum=0)
        p.define(
            "bias_update_speed", 1e-3, "Change of the bias in a step; 0 disables it.", minimum=0
        )
        p.define(
            "auxiliary_loss_weight", 0.0, "Factor of the loss that balances each group.", minimum=0
        )
        group_limited.define(p, scores_per_group=2)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.k == 1 and p.normalize:
            raise UserError(
                f"{path}.k=1 with {path}.normalize=True: every gate would be {path}.scale, so the "
                f"router could not learn; set {path}.normalize=False"
            )
        group_limited.check(self, p.k)
        rule = functools.partial(_update_bias, speed=p.bias_update_speed)
        sizes, zero = {"E": p.num_experts}, initializers.constant(0.0)
        self.create_variable("selection_bias", "E", sizes, zero, unsplit="E", update_rule=rule)

    @property
    def balance_floor(self) -> float | None:
        """1, as for a softmax, since the scores are divided by their sum; None without the loss."""
        return 1.0 if self.p.auxiliary_loss_weight else None

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        """Returns the routing of a batch; see `Router.fprop`."""
        p = self.p
        logits_GSE = self.logits(theta, x_GSM)
        scores_GSE = tf.sigmoid(logits_GSE)
        biased_GSE = scores_GSE + tf.stop_gradient(tf.cast(theta.selection_bias, tf.float32))
        selected = selection.top_k(group_limited.limit_by_params(p, biased_GSE), p.k)
        self._report_load(theta, selection.sum_of_one_hots(selected) * mask_GS[..., None])

        gates = [selection.value_at(scores_GSE, chosen_GSE) for _, chosen_GSE in selected]
        if p.normalize:
            sum_GS = tf.add_n(gates) + _TINY
            gates = [gate_GS / sum_GS for gate_GS in gates]
        choices = [
            Choice(expert_GS, gate_GS * p.scale, mask_GS, mask_GS)
            for (expert_GS, _), gate_GS in zip(selected, gates, strict=True)
        ]
        shares_GSE = scores_GSE / (tf.reduce_sum(scores_GSE, -1, keepdims=True) + _TINY)
        losses = self._auxiliary_loss(scores_GSE, shares_GSE, mask_GS)
        losses.update(self.z_loss(logits_GSE, mask_GS))
        metrics = {"router_entropy": gate_entropy(shares_GSE, mask_GS)}
        return self.route(choices, self.capacity(x_GSM.shape[1]), losses, metrics)

    @layer_method
    def _report_load(self, theta: NestedMap, counted_GSE: tf.Tensor) -> None:
        """Reports E * (load - mean load), an integer per expert, to the update rule of the bias.

        Args:
          theta: the router's weights.
          counted_GSE: 1 where a token selected an expert, whether or not it got a slot.
        """
        if not context.current().training:
            return
        load_E = tf.reduce_sum(counted_GSE, (0, 1))
        excess_E = load_E * self.p.num_experts - tf.reduce_sum(load_E)
        self.report_update("selection_bias", theta.selection_bias, excess_E)

    def _auxiliary_loss(
        self, scores_GSE: tf.Tensor, shares_GSE: tf.Tensor, mask_GS: tf.Tensor
    ) -> dict[str, WeightedLoss]:
        """Returns {"auxiliary_loss": loss}, or an empty dict if its weight is 0.

        The loss is 1 for balanced loads.
        """
        p = self.p
        if not p.auxiliary_loss_weight:
            return {}
        # The paper counts the experts with the largest scores without the bias.
        counted_GSE = selection.sum_of_one_hots(selection.top_k(scores_GSE, p.k))
        counted_GSE *= mask_GS[..., None]
        loss = balance_loss.auxiliary_loss(shares_GSE, counted_GSE / p.k, mask_GS)
        return {"auxiliary_loss": WeightedLoss(loss, p.auxiliary_loss_weight)}


def _update_bias(bias: tf.Tensor, excess: tf.Tensor, speed: float) -> tf.Tensor:
    return bias - speed * tf.sign(excess)
