"""The auxiliary loss that has routers load their experts evenly, over groups, batches or more."""

from __future__ import annotations

import functools

import tensorflow as tf

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap

GROUP, BATCH, GLOBAL = "group", "batch", "global"
LEVELS = (GROUP, BATCH, GLOBAL)


def auxiliary_loss(
    gates_GSE: tf.Tensor,
    counted_GSE: tf.Tensor,
    mask_GS: tf.Tensor,
    level: str = GROUP,
    recent: RecentLoad | None = None,
    theta: NestedMap | None = None,
) -> tf.Tensor:
    """Returns E times the sum over experts of (share of tokens) * (mean gate): 1 for even loads.

    That is E^2 times the paper's (arXiv 2006.16668, Algorithm 1) and the form of Fedus et al. 2021
    (arXiv 2101.03961, equation 4). counted is 1 at the experts that a token counts for and 0 at
    padding; the gradient passes through the gates alone.

    level: 'group' takes the mean over groups of each one's loss; 'batch' shares and means of all
    groups together, on however many devices; 'global' the shares of `recent` batches, too: Qiu et
    al. 2025 (arXiv 2501.11873) on why experts then specialize more.
    """
    experts = gates_GSE.shape[-1]
    tokens = (1,) if level == GROUP else (0, 1)
    real = tf.maximum(tf.reduce_sum(mask_GS, tokens), 1.0)[..., None]
    share = tf.stop_gradient(tf.reduce_sum(counted_GSE, tokens)) / real
    if level == GLOBAL:
        share = recent.fprop(theta, share)
    mean_gate = tf.reduce_sum(gates_GSE * mask_GS[..., None], tokens) / real
    return tf.reduce_mean(tf.reduce_sum(share * mean_gate, -1)) * experts


class RecentLoad(Layer):
    """The shares of tokens that experts got in the batches before, the latest the most."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("num_experts", 0, "Size of E.")
        p.define("decay", 0.9, "Weight of what was before against the batch under way.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if not 0 <= p.decay < 1:
            raise ValueError(f"{path}.decay: {p.decay}; 0 or more and less than 1 was expected")
        rule = functools.partial(_towards, decay=p.decay)
        sizes = {"E": p.num_experts}
        start = initializers.constant(0.0)
        self.create_variable("share", "E", sizes, start, unsplit="E", update_rule=rule)

    @layer_method
    def fprop(self, theta: NestedMap, share_E: tf.Tensor) -> tf.Tensor:
        """Returns the mean share [E] of this batch and those before, and keeps this one's."""
        self.report_update("share", theta.share, share_E)
        mean_E = self.p.decay * tf.stop_gradient(theta.share) + (1 - self.p.decay) * share_E
        total = tf.reduce_sum(share_E)
        return mean_E * total / tf.maximum(tf.reduce_sum(mean_E), 1e-9)


def _towards(weight: tf.Tensor, share: tf.Tensor, decay: float) -> tf.Tensor:
    return decay * weight + (1 - decay) * share
