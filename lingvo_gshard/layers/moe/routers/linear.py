"""Base classes of learned routers: logits are a float32 product of the token with a weight."""

from __future__ import annotations

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import groups
from lingvo_gshard.layers.moe.load_metrics import gate_entropy
from lingvo_gshard.layers.moe.routers import balance_loss
from lingvo_gshard.layers.moe.routers.router import Router
from lingvo_gshard.layers.moe.routers.token_choice import TokenChoiceRouter
from lingvo_gshard.layers.moe.routing import WeightedLoss
from lingvo_gshard.sharding import annotate, einsum


class LinearRouter(Router):
    """A router whose logits are products of tokens with a weight [M,E].

    `jitter` is that of Fedus et al. 2021 (arXiv 2101.03961, section 2.4). The z-loss is the mean
    over tokens of the squared log-sum-exp of the logits (Zoph et al. 2022, arXiv 2202.08906,
    equation 5).
    """

    is_learned = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "jitter",
            0.0,
            "In training the input is multiplied by 1 - jitter to 1 + jitter.",
            minimum=0,
            maximum=1,
        )
        p.define("use_bias", False, "Whether the logits have a learned bias.")
        p.define("z_loss_weight", 0.0, "Factor of the loss that keeps logits small.", minimum=0)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        sizes = {"M": p.model_dim, "E": p.num_experts}
        # The paper replicates the router's weight (section 3.2): every group sees every expert.
        init = initializers.fan_in(p.model_dim)
        self.create_variable("w_gate", "ME", sizes, init, unsplit="E")
        if p.use_bias:
            zeros = initializers.constant(0.0)
            self.create_variable("b_gate", "E", {"E": p.num_experts}, zeros, unsplit="E")

    @layer_method
    def logits(self, theta: NestedMap, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the logits [G,S,E] in float32."""
        x_float = tf.cast(x_GSM, tf.float32)
        if self.p.jitter and context.current().training:
            drawn = groups.uniform(x_GSM.shape, self.random_seed("jitter"))
            x_float *= 1.0 + self.p.jitter * (2.0 * annotate(drawn, "GSM") - 1.0)
        logits_GSE = einsum("GSM,ME->GSE", x_float, tf.cast(theta.w_gate, tf.float32))
        return logits_GSE + tf.cast(theta.b_gate, tf.float32) if self.p.use_bias else logits_GSE

    def z_loss(self, logits_GSE: tf.Tensor, mask_GS: tf.Tensor) -> dict[str, WeightedLoss]:
        """Returns {"z_loss": loss}, or an empty dict if its weight is 0."""
        if not self.p.z_loss_weight:
            return {}
        # Padding is masked first: its square may overflow, and infinity times 0 is no number.
        real_GSE = tf.where(mask_GS[..., None] > 0, logits_GSE, 0.0)
        squared_GS = tf.square(tf.reduce_logsumexp(real_GSE, -1))
        mean = tf.reduce_sum(squared_GS * mask_GS) / tf.maximum(tf.reduce_sum(mask_GS), 1.0)
        return {"z_loss": WeightedLoss(mean, self.p.z_loss_weight)}

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of the logits."""
        return 2 * shape.tokens * self.p.model_dim * self.p.num_experts


class LinearTokenChoiceRouter(LinearRouter, TokenChoiceRouter):
    """A router with linear logits in which tokens choose experts."""


class SoftmaxRouter(LinearTokenChoiceRouter):
    """A router whose gates are a softmax of the logits, balanced by an auxiliary loss."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("auxiliary_loss_weight", 0.01, "Factor k of the load-balancing loss.", minimum=0)
        p.define(
            "auxiliary_loss_level",
            balance_loss.GROUP,
            "Tokens over which the loss balances loads: of a 'group', of a 'batch', or of a moving "
            "average over batches, 'global'.",
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.check_choice("auxiliary_loss_level", balance_loss.LEVELS)
        if self.p.auxiliary_loss_level == balance_loss.GLOBAL:
            recent = balance_loss.RecentLoad.params().set(num_experts=self.p.num_experts)
            self.create_child("recent_load", recent)

    @property
    def balance_floor(self) -> float | None:
        """1: each expert has 1/E of the tokens, and the mean gates sum to 1."""
        return 1.0

    @layer_method
    def auxiliary_loss(
        self, theta: NestedMap, gates_GSE: tf.Tensor, counted_GSE: tf.Tensor, mask_GS: tf.Tensor
    ) -> tf.Tensor:
        """Returns the load-balancing loss, unweighted; see `balance_loss.auxiliary_loss`."""
        level = self.p.auxiliary_loss_level
        recent = (self.recent_load, theta.recent_load) if level == balance_loss.GLOBAL else ()
        return balance_loss.auxiliary_loss(gates_GSE, counted_GSE, mask_GS, level, *recent)

    def metrics(self, gates_GSE: tf.Tensor, mask_GS: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the metrics of the gates."""
        return {"router_entropy": gate_entropy(gates_GSE, mask_GS)}
