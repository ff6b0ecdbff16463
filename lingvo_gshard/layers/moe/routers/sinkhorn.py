"""Balanced assignment: in training experts have prices, such that tokens spread over them evenly.

BASE layers (Lewis et al. 2021, arXiv 2103.16716) assign equally many tokens to each expert, so that
the sum of scores is largest. Clark et al. 2022 (arXiv 2202.01169, appendix B.2.1) relax that by an
entropy, which makes it Sinkhorn's iteration: a few steps that any accelerator computes well.
"""

import math

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import choosing
from lingvo_gshard.layers.moe.balance import entropy
from lingvo_gshard.layers.moe.gates import LearnedRouter
from lingvo_gshard.layers.moe.places import Pick
from lingvo_gshard.layers.moe.routing import Routing

_GATES = ("softmax", "sigmoid")
# Logits of padding, where prices are made; finite, for groups of nothing else.
_NOTHING = -1e9


class SinkhornRouter(LearnedRouter):
    """Sends every token to the expert whose logit, less the expert's price, is largest.

    Prices are those of the entropic assignment of the group's real tokens to experts of equal
    loads; they carry no gradient, and no auxiliary loss is needed. In evaluation nothing has a
    price. The gate is the chosen expert's share of a softmax of the logits, or as in BASE layers
    the sigmoid of its logit.

    In training a token's expert thus depends on later tokens of its group, and tells something of
    them to a causal decoder; in evaluation it does not. So a decoder with this router decodes, but
    was trained with a hint that it does not have then: allow_causal says that this is accepted.
    """

    sees_later_tokens = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("gate", "softmax", "What outputs are multiplied by: 'softmax' or 'sigmoid'.")
        p.define("iterations", 10, "How often prices are corrected.")
        p.define(
            "temperature",
            1.0,
            "Logits are divided by it where prices are made; the smaller, the evener are loads and "
            "the more iterations are needed.",
        )
        p.define("allow_causal", False, "Whether a causal decoder may have this router.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.check_choice("gate", _GATES)
        self.check_range("iterations", 1)
        self.check_range("temperature", 1e-3)

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        """Returns 1."""
        return 1

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
        scores_GSE = tf.stop_gradient(logits_GSE)
        if context.current().training:
            scores_GSE /= p.temperature
            scores_GSE -= prices(scores_GSE, mask_GS, p.iterations)[:, None]
        expert_GS, chosen_GSE = choosing.best(scores_GSE)
        softmax_GSE = tf.nn.softmax(logits_GSE)
        gates_GSE = softmax_GSE if p.gate == "softmax" else tf.sigmoid(logits_GSE)
        pick = Pick(expert_GS, choosing.value_at(gates_GSE, chosen_GSE), mask_GS, mask_GS)
        return self.route(
            [pick],
            self.capacity(x_GSM.shape[1]),
            self.z_loss(logits_GSE, mask_GS),
            {"router_entropy": entropy(softmax_GSE, mask_GS)},
        )


def prices(scores_GSE: tf.Tensor, mask_GS: tf.Tensor, iterations: int) -> tf.Tensor:
    """Returns [G,E], the prices of experts after that many of Sinkhorn's iterations.

    In each one exp(scores - prices - shift of the token) is made to sum to 1 for every token, and
    then to (real tokens) / E for every expert, which in the limit hold together.
    """
    experts = scores_GSE.shape[-1]
    real_GSE = mask_GS[..., None] > 0
    log_load_GE = tf.math.log(tf.maximum(tf.reduce_sum(mask_GS, 1), 1.0)[:, None])
    log_load_GE -= math.log(experts)
    price_GE = tf.zeros((scores_GSE.shape[0], experts))
    for _ in range(iterations):
        shift_GS = tf.reduce_logsumexp(scores_GSE - price_GE[:, None], -1)
        share_GSE = tf.where(real_GSE, scores_GSE - shift_GS[..., None], _NOTHING)
        price_GE = tf.reduce_logsumexp(share_GSE, 1) - log_load_GE
    return price_GE
