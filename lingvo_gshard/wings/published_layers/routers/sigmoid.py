"""Sigmoid gates, balanced by a selection bias instead of a loss (arXiv 2412.19437)."""

from __future__ import annotations

import functools

from lingvo_gshard.core import NestedMap, Params, context, initializers, layer_method, tf
from lingvo_gshard.layers import (
    BALANCE_LOSS,
    Choice,
    LinearScores,
    Router,
    RouterPart,
    TokenCapacity,
    TokenChoiceRouting,
    WeightedLoss,
    auxiliary_loss,
    gate_metrics,
    groups_with_tokens,
    selection,
)
from lingvo_gshard.wings.published_layers.routers.group_limited import LimitedTopK

# Keeps gates finite if all scores underflow to 0 in float32.
_TINY = 1e-20


class SelectionBias(RouterPart):
    """Adds a bias to the scores that select experts, smaller for experts with many tokens.

    After each step the bias decreases for experts with more than the mean load and increases for
    those with less (Wang et al. 2024, arXiv 2408.15664, Algorithm 1). It has no gradient, and no
    optimizer updates it.
    """

    def define(self, p: Params) -> None:
        """Defines the speed of the bias; see `RouterPart.define`."""
        p.define("bias_update_speed", 1e-3, "Change of the bias in a step; 0: none.", minimum=0)
        p.define("use_selection_bias", True, "Whether there is such a bias.")

    def create(self) -> None:
        """Creates the bias; see `RouterPart.create`."""
        if not self.p.use_selection_bias:
            return
        rule = functools.partial(_update_bias, speed=self.p.bias_update_speed)
        sizes, zero = {"E": self.p.num_experts}, initializers.constant(0.0)
        self.router.create_variable(
            "selection_bias", "E", sizes, zero, unsplit="E", update_rule=rule
        )

    def add(self, theta: NestedMap, scores_GSE: tf.Tensor) -> tf.Tensor:
        """Returns the scores with the bias, for selection only.

        Args:
          scores_GSE: float32, the scores.
        """
        if not self.p.use_selection_bias:
            return scores_GSE
        return scores_GSE + tf.stop_gradient(tf.cast(theta.selection_bias, tf.float32))

    @layer_method
    def report_load(self, theta: NestedMap, counted_GSE: tf.Tensor) -> None:
        """Reports E * (load - mean load), an integer per expert, to the update rule of the bias.

        Args:
          counted_GSE: 1 where a token selected an expert, whether or not it got a slot.
        """
        if not context.current().training or not self.p.use_selection_bias:
            return
        load_E = tf.reduce_sum(counted_GSE, (0, 1))
        excess_E = load_E * self.p.num_experts - tf.reduce_sum(load_E)
        self.router.report_update("selection_bias", theta.selection_bias, excess_E)


def _update_bias(bias: tf.Tensor, excess: tf.Tensor, speed: float) -> tf.Tensor:
    return bias - speed * tf.sign(excess)


class ComplementaryLoss(RouterPart):
    """Adds the complementary loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20).

    It is computed per group of tokens; the paper computes it per sequence.
    """

    def define(self, p: Params) -> None:
        """Defines the weight of the loss; see `RouterPart.define`."""
        p.define("auxiliary_loss_weight", 0.0, "Factor of the loss balancing groups.", minimum=0)

    @property
    def balance_floor(self) -> float | None:
        """1, as for a softmax, since the scores are divided by their sum; None without the loss."""
        return 1.0 if self.p.auxiliary_loss_weight else None

    def losses(
        self, scores_GSE: tf.Tensor, shares_GSE: tf.Tensor, mask_GS: tf.Tensor
    ) -> dict[str, WeightedLoss]:
        """Returns {"auxiliary_loss": loss}, or an empty dict if its weight is 0.

        The loss is 1 for balanced loads.

        Args:
          scores_GSE: the scores without the bias. A token counts for its k largest.
          shares_GSE: the scores divided by their sum over experts.
          mask_GS: float32, 0 at padding.
        """
        p = self.p
        if not p.auxiliary_loss_weight:
            return {}
        counted_GSE = selection.sum_of_one_hots(selection.top_k(scores_GSE, p.k))
        counted_GSE *= mask_GS[..., None]
        loss = auxiliary_loss(shares_GSE, counted_GSE / p.k, mask_GS)
        count = groups_with_tokens(mask_GS)
        return {BALANCE_LOSS: WeightedLoss(loss, p.auxiliary_loss_weight, count)}


class SigmoidRouter(Router):
    """Sends each token to the k experts with the largest sigmoid(logit) + selection_bias.

    DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Gates are the sigmoids, without
    the bias.
    """

    scores = LinearScores()
    selection = LimitedTopK(scores_per_group=2, epsilon=_TINY)
    bias = SelectionBias()
    balance = ComplementaryLoss()
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
        scores_GSE = self._scores(logits_GSE)
        selected = self._select(theta, scores_GSE, ids_GS)
        self.bias.report_load(theta, selection.sum_of_one_hots(selected) * mask_GS[..., None])
        gates = self.selection.gates(scores_GSE, selected)
        choices = [
            Choice(expert_GS, gate_GS, mask_GS, mask_GS)
            for (expert_GS, _), gate_GS in zip(selected, gates, strict=True)
        ]
        shares_GSE = scores_GSE / (tf.reduce_sum(scores_GSE, -1, keepdims=True) + _TINY)
        losses = self.balance.losses(scores_GSE, shares_GSE, mask_GS)
        losses.update(self.scores.losses(logits_GSE, mask_GS))
        return self.capacity.route(choices, losses, gate_metrics(shares_GSE, mask_GS))

    @layer_method
    def _select(
        self, theta: NestedMap, scores_GSE: tf.Tensor, ids_GS: tf.Tensor | None
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns (index, one-hot) of each token's k experts."""
        del ids_GS
        return self.selection.select(self.bias.add(theta, scores_GSE))

    def _scores(self, logits_GSE: tf.Tensor) -> tf.Tensor:
        """Returns the scores, which are at least 0."""
        return tf.sigmoid(logits_GSE)


class BiasedSoftmaxRouter(SigmoidRouter):
    """Sends each token to the k experts with the largest softmax(logits) + selection_bias.

    Baidu 2025 (ERNIE 4.5 technical report, section 3.2). Gates are the softmax, without the bias.
    """

    def _scores(self, logits_GSE: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(logits_GSE)
