"""Balanced assignment by Sinkhorn's iteration.

BASE layers (Lewis et al. 2021, arXiv 2103.16716) assign the same number of tokens to each expert so
that the sum of the scores is largest. Clark et al. 2022 (arXiv 2202.01169, appendix B.2.1) relax
this by an entropy term. The solution is then Sinkhorn's iteration, a few steps that any accelerator
computes well.
"""

from __future__ import annotations

import math

from lingvo_gshard.core import NestedMap, Params, context, layer_method, tf
from lingvo_gshard.layers import (
    Choice,
    LinearScores,
    Router,
    TokenCapacity,
    TokenChoiceRouting,
    gate_metrics,
    selection,
)

# Log-score of padding in the iteration; finite, so that groups of padding alone give no NaN.
_PADDING = -1e9
# Share of a price that is not subtracted, to break ties. A token alone in its group, or tokens that
# are all alike, would else value all experts equally after prices. Rounding would then choose the
# expert, another one on another mesh. With this share the expert with the largest logit is chosen.
_TIE_BREAK = 2.0**-12


class SinkhornRouter(Router):
    """Sends each token to the expert with the largest logit minus the expert's price.

    In training the prices are the dual variables of the entropic assignment of the group's real
    tokens to experts with even loads. They have no gradient, and no auxiliary loss is needed. In
    evaluation all prices are 0. The gate is the expert's softmax probability or, as in BASE layers,
    the sigmoid of its logit.

    In training a token's expert depends on later tokens of its group, which leaks information to a
    causal decoder. In evaluation the expert does not depend on later tokens. A decoder with this
    router can therefore generate text, but without information that training had. `allow_causal`
    accepts that.
    """

    scores = LinearScores()
    capacity = TokenCapacity()
    is_learned = True
    sees_later_tokens = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        about = "Gate: 'softmax' or 'sigmoid' of the logits."
        p.define("gate", "softmax", about, choices=("softmax", "sigmoid"))
        p.define("iterations", 10, "Number of Sinkhorn iterations.", minimum=1)
        p.define(
            "temperature",
            1.0,
            "Divisor of the logits in the iteration. A smaller one makes loads more even and needs "
            "more iterations.",
            minimum=1e-3,
        )
        return p

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
        p = self.p
        logits_GSE = self.scores.logits(theta, x_GSM)
        scores_GSE = tf.stop_gradient(logits_GSE)
        if context.current().training:
            scores_GSE /= p.temperature
            price_GE = prices(scores_GSE, mask_GS, p.iterations)
            scores_GSE -= (1.0 - _TIE_BREAK) * price_GE[:, None]
        ((expert_GS, chosen_GSE),) = selection.settled(self, [selection.top_1(scores_GSE)])
        softmax_GSE = tf.nn.softmax(logits_GSE)
        gates_GSE = softmax_GSE if p.gate == "softmax" else tf.sigmoid(logits_GSE)
        choice = Choice(expert_GS, selection.value_at(gates_GSE, chosen_GSE), mask_GS, mask_GS)
        losses = self.scores.losses(logits_GSE, mask_GS)
        return self.capacity.route([choice], losses, gate_metrics(softmax_GSE, mask_GS))


def prices(scores_GSE: tf.Tensor, mask_GS: tf.Tensor, iterations: int) -> tf.Tensor:
    """Returns [G,E], the prices of the experts.

    Each iteration first scales exp(scores - prices) to a sum of 1 for every token. It then sets the
    prices for a sum of (real tokens) / E for every expert. In the limit both hold.

    Args:
      scores_GSE: float32, the score of each expert for each token.
      mask_GS: float32, 0 at padding.
    """
    experts = scores_GSE.shape[-1]
    real_GSE = mask_GS[..., None] > 0
    log_load_GE = tf.math.log(tf.maximum(tf.reduce_sum(mask_GS, 1), 1.0)[:, None])
    log_load_GE -= math.log(experts)
    price_GE = tf.zeros((scores_GSE.shape[0], experts))
    for _ in range(iterations):
        shift_GS = tf.reduce_logsumexp(scores_GSE - price_GE[:, None], -1)
        share_GSE = tf.where(real_GSE, scores_GSE - shift_GS[..., None], _PADDING)
        price_GE = tf.reduce_logsumexp(share_GSE, 1) - log_load_GE
    return price_GE
