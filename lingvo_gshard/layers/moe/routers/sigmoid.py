"""Sigmoid gates, balanced by a bias in choosing instead of a loss (arXiv 2412.19437)."""

from __future__ import annotations

import functools

import tensorflow as tf

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import balance_loss, choosing
from lingvo_gshard.layers.moe.balance import entropy
from lingvo_gshard.layers.moe.gates import LearnedRouter
from lingvo_gshard.layers.moe.places import Pick
from lingvo_gshard.layers.moe.routers import group_limited
from lingvo_gshard.layers.moe.routing import Routing, WeightedLoss

# Keeps gates finite where all scores are 0 in float32.
_TINY = 1e-20


class SigmoidRouter(LearnedRouter):
    """Sends every token to the k experts of the largest sigmoid(logit) + selection_bias.

    DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Gates are the scores, the
    sigmoids, without the bias. After each step the bias of an expert with more than the mean load
    is a little less, and of one with less a little more: Wang et al. 2024 (arXiv 2408.15664,
    Algorithm 1). No gradient passes through it and no optimizer moves it.

    The auxiliary loss is that paper's complementary one (equations 17 to 20), with a group of
    tokens in the place of a sequence.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("k", 2, "How many experts a token gets.")
        p.define("normalize", True, "Whether a token's scores are divided by their sum.")
        p.define("scale", 1.0, "By which gates are multiplied, after that.")
        p.define("bias_update_speed", 1e-3, "How far the bias moves in a step; 0: it does not.")
        p.define("auxiliary_loss_weight", 0.0, "Factor of the loss that balances single groups.")
        group_limited.define(p, scores_per_group=2)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self.check_range("k", 1)
        for name in ("scale", "bias_update_speed", "auxiliary_loss_weight"):
            self.check_range(name, 0)
        if p.k == 1 and p.normalize:
            raise ValueError(
                f"{path}.k=1 with {path}.normalize=True: a gate is {path}.scale whatever the "
                f"router's weight, which could not learn from it; set {path}.normalize False"
            )
        group_limited.check(self, p.k)
        rule = functools.partial(_against, speed=p.bias_update_speed)
        sizes, zero = {"E": p.num_experts}, initializers.constant(0.0)
        self.create_variable("selection_bias", "E", sizes, zero, unsplit="E", update_rule=rule)

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> Routing:
        """Returns the Routing of x; tokens whose float32 mask is 0 go nowhere and count nowhere."""
        p = self.p
        logits_GSE = self.logits(theta, x_GSM)
        scores_GSE = tf.sigmoid(logits_GSE)
        biased_GSE = scores_GSE + tf.stop_gradient(tf.cast(theta.selection_bias, tf.float32))
        chosen = choosing.best_few(group_limited.limited_as(p, biased_GSE), p.k)
        self._report_load(theta, _sum_of_choices(chosen) * mask_GS[..., None])

        gates = [choosing.value_at(scores_GSE, chosen_GSE) for _, chosen_GSE in chosen]
        if p.normalize:
            sum_GS = tf.add_n(gates) + _TINY
            gates = [gate_GS / sum_GS for gate_GS in gates]
        picks = [
            Pick(expert_GS, gate_GS * p.scale, mask_GS, mask_GS)
            for (expert_GS, _), gate_GS in zip(chosen, gates, strict=True)
        ]
        shares_GSE = scores_GSE / (tf.reduce_sum(scores_GSE, -1, keepdims=True) + _TINY)
        losses = self._auxiliary_loss(scores_GSE, shares_GSE, mask_GS)
        losses.update(self.z_loss(logits_GSE, mask_GS))
        metrics = {"router_entropy": entropy(shares_GSE, mask_GS)}
        return self.route(picks, self.capacity(x_GSM.shape[1]), losses, metrics)

    @layer_method
    def _report_load(self, theta: NestedMap, counted_GSE: tf.Tensor) -> None:
        """Reports E times the load above the mean one: whole numbers, that are 0 where even.

        Counted is what tokens chose, whether there was room or not.
        """
        if not context.current().training:
            return
        load_E = tf.reduce_sum(counted_GSE, (0, 1))
        excess_E = load_E * self.p.num_experts - tf.reduce_sum(load_E)
        self.report_update("selection_bias", theta.selection_bias, excess_E)

    def _auxiliary_loss(
        self, scores_GSE: tf.Tensor, shares_GSE: tf.Tensor, mask_GS: tf.Tensor
    ) -> dict[str, WeightedLoss]:
        """The loss of single groups by its name: 1 for even loads; nothing without a weight."""
        p = self.p
        if not p.auxiliary_loss_weight:
            return {}
        # The paper counts the experts of the largest scores, without the bias.
        counted_GSE = _sum_of_choices(choosing.best_few(scores_GSE, p.k)) * mask_GS[..., None]
        loss = balance_loss.auxiliary_loss(shares_GSE, counted_GSE / p.k, mask_GS)
        return {"auxiliary_loss": WeightedLoss(loss, p.auxiliary_loss_weight)}


def _sum_of_choices(chosen: list[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
    """1 at every expert that a token chose."""
    return tf.add_n([one_hot_GSE for _, one_hot_GSE in chosen])


def _against(bias: tf.Tensor, excess: tf.Tensor, speed: float) -> tf.Tensor:
    return bias - speed * tf.sign(excess)
