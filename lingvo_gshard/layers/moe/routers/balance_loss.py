"""BalanceLoss: keeps loads even over the tokens of a group, of a batch, or of recent batches."""

from __future__ import annotations

import functools

from lingvo_gshard.core import Layer, NestedMap, Params, initializers, layer_method, tf
from lingvo_gshard.layers.moe.routers.router import RouterPart
from lingvo_gshard.layers.moe.routing import WeightedLoss

GROUP, BATCH, GLOBAL = "group", "batch", "global"
LEVELS = (GROUP, BATCH, GLOBAL)


class BalanceLoss(RouterPart):
    """Adds a loss that is smallest if every expert has equally many tokens."""

    def define(self, p: Params) -> None:
        """Defines the weight and the level of the loss; see `RouterPart.define`."""
        p.define("auxiliary_loss_weight", 0.01, "Factor k of the load-balancing loss.", minimum=0)
        p.define(
            "auxiliary_loss_level",
            GROUP,
            "Tokens over which the loss balances loads: of a 'group', of a 'batch', or of a moving "
            "average over batches, 'global'.",
            choices=LEVELS,
        )

    def create(self) -> None:
        """Creates the average over batches, if the loss needs it; see `RouterPart.create`."""
        if self.p.auxiliary_loss_level == GLOBAL:
            recent = RecentLoad.params().set(num_experts=self.p.num_experts)
            self.router.create_child("recent_load", recent)

    @property
    def balance_floor(self) -> float | None:
        """1: each expert has 1/E of the tokens, and the mean gates sum to 1."""
        return 1.0

    @layer_method
    def auxiliary_loss(
        self, theta: NestedMap, gates_GSE: tf.Tensor, counted_GSE: tf.Tensor, mask_GS: tf.Tensor
    ) -> WeightedLoss:
        """Returns the loss, by the function `auxiliary_loss`."""
        level = self.p.auxiliary_loss_level
        recent = (self.router.recent_load, theta.recent_load) if level == GLOBAL else ()
        counted_GSE *= mask_GS[..., None]
        loss = auxiliary_loss(gates_GSE, counted_GSE, mask_GS, level, *recent)
        count = groups_with_tokens(mask_GS) if level == GROUP else None
        return WeightedLoss(loss, self.p.auxiliary_loss_weight, count)


def groups_with_tokens(mask_GS: tf.Tensor) -> tf.Tensor:
    """Returns how many groups have tokens, a float32 scalar; the mask is 0 at padding."""
    return tf.reduce_sum(tf.cast(tf.reduce_any(mask_GS > 0, 1), tf.float32))


def auxiliary_loss(
    gates_GSE: tf.Tensor,
    counted_GSE: tf.Tensor,
    mask_GS: tf.Tensor,
    level: str = GROUP,
    recent: RecentLoad | None = None,
    theta: NestedMap | None = None,
) -> tf.Tensor:
    """Returns E times the sum over experts of (share of tokens) * (mean gate): 1 for even loads.

    This is E^2 times the paper's loss (arXiv 2006.16668, Algorithm 1), in the form of Fedus et al.
    2021 (arXiv 2101.03961, equation 4). The gradient flows through the gates only.

    Args:
      gates_GSE: float32, the gates of all experts.
      counted_GSE: float32, 1 at the experts that a token counts for; 0 at padding.
      mask_GS: float32, 0 at padding.
      level: 'group' is the mean over groups with tokens of each group's loss. 'batch' takes shares
        and means over all groups, on all devices. 'global' also averages the shares over recent
        batches, which lets experts specialize more (Qiu et al. 2025, arXiv 2501.11873).
      recent: the shares of recent batches, for 'global'.
      theta: the weights of `recent`.
    """
    experts = gates_GSE.shape[-1]
    tokens = (1,) if level == GROUP else (0, 1)
    real = tf.maximum(tf.reduce_sum(mask_GS, tokens), 1.0)[..., None]
    load = tf.stop_gradient(tf.reduce_sum(counted_GSE, tokens))
    share = load / real if recent is None else recent.fprop(theta, load)
    real_gates_GSE = tf.where(mask_GS[..., None] > 0, gates_GSE, 0.0)
    mean_gate = tf.reduce_sum(real_gates_GSE, tokens) / real
    losses = tf.reduce_sum(share * mean_gate, -1)
    if level != GROUP:
        return losses * experts
    has_tokens_G = tf.cast(tf.reduce_any(mask_GS > 0, 1), tf.float32)
    groups = tf.maximum(groups_with_tokens(mask_GS), 1.0)
    return tf.reduce_sum(losses * has_tokens_G) / groups * experts


class RecentLoad(Layer):
    """Keeps a moving average over batches of each expert's share of the tokens."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("num_experts", 0, "Size of E.", minimum=1)
        p.define_fraction("decay", 0.9, "Decay of the moving average.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        rule = functools.partial(_move_average, decay=p.decay)
        sizes = {"E": p.num_experts}
        start = initializers.constant(0.0)
        self.create_variable("share", "E", sizes, start, unsplit="E", update_rule=rule)

    @layer_method
    def fprop(self, theta: NestedMap, load_E: tf.Tensor) -> tf.Tensor:
        """Returns the average share [E] with this batch included, and reports it for the update.

        Args:
          load_E: float32, the number of tokens that each expert counts for; one token may count for
            several in parts that add up to 1.
        """
        self.report_update("share", theta.share, load_E)
        mean_E = _move_average(tf.stop_gradient(theta.share), load_E, self.p.decay)
        return tf.math.divide_no_nan(mean_E, tf.reduce_sum(mean_E))


def _move_average(share_E: tf.Tensor, load_E: tf.Tensor, decay: float) -> tf.Tensor:
    """Returns the average with the loads of one more batch; the old one if it had no tokens."""
    total = tf.reduce_sum(load_E)
    moved_E = decay * share_E + (1 - decay) * tf.math.divide_no_nan(load_E, total)
    return tf.where(total > 0, moved_E, share_E)
