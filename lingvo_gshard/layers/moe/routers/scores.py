"""LinearScores: learned scores of the experts, the logits of most routers."""

from __future__ import annotations

from lingvo_gshard.core import NestedMap, Params, context, initializers, layer_method, tf
from lingvo_gshard.layers.moe import groups
from lingvo_gshard.layers.moe.routers.router import RouterPart
from lingvo_gshard.layers.moe.routing import WeightedLoss
from lingvo_gshard.sharding import annotate, einsum


class LinearScores(RouterPart):
    """Computes logits as products of tokens with a weight [M,E].

    `jitter` follows Fedus et al. 2021 (arXiv 2101.03961, section 2.4). The z-loss is the mean
    over tokens of the squared log-sum-exp of the logits (Zoph et al. 2022, arXiv 2202.08906,
    equation 5).
    """

    def define(self, p: Params) -> None:
        """Defines the options of the logits; see `RouterPart.define`."""
        p.define(
            "jitter", 0.0, "Training's inputs have factors of 1 +- jitter.", minimum=0, maximum=1
        )
        p.define("use_bias", False, "Whether the logits have a learned bias.")
        p.define("z_loss_weight", 0.0, "Factor of the loss that keeps logits small.", minimum=0)

    def create(self) -> None:
        """Creates the weight and the bias; see `RouterPart.create`."""
        p = self.p
        sizes = {"M": p.model_dim, "E": p.num_experts}
        # The paper replicates the router's weight (section 3.2): every group sees every expert.
        init = initializers.fan_in(p.model_dim)
        self.router.create_variable("w_gate", "ME", sizes, init, unsplit="E")
        if p.use_bias:
            zeros = initializers.constant(0.0)
            self.router.create_variable("b_gate", "E", {"E": p.num_experts}, zeros, unsplit="E")

    @layer_method
    def logits(self, theta: NestedMap, x_GSM: tf.Tensor) -> tf.Tensor:
        """Returns the logits [G,S,E] in float32."""
        x_float = tf.cast(x_GSM, tf.float32)
        if self.p.jitter and context.current().training:
            drawn = groups.uniform(x_GSM.shape, self.router.random_seed("jitter"))
            x_float *= 1.0 + self.p.jitter * (2.0 * annotate(drawn, "GSM") - 1.0)
        logits_GSE = einsum("GSM,ME->GSE", x_float, tf.cast(theta.w_gate, tf.float32))
        return logits_GSE + tf.cast(theta.b_gate, tf.float32) if self.p.use_bias else logits_GSE

    def losses(self, logits_GSE: tf.Tensor, mask_GS: tf.Tensor) -> dict[str, WeightedLoss]:
        """Returns {"z_loss": loss}, or an empty dict if its weight is 0. Padding does not count."""
        if not self.p.z_loss_weight:
            return {}
        # Padding is masked first: its square may overflow, and infinity times 0 is no number.
        real_GSE = tf.where(mask_GS[..., None] > 0, logits_GSE, 0.0)
        squared_GS = tf.square(tf.reduce_logsumexp(real_GSE, -1))
        mean = tf.reduce_sum(squared_GS * mask_GS) / tf.maximum(tf.reduce_sum(mask_GS), 1.0)
        return {"z_loss": WeightedLoss(mean, self.p.z_loss_weight)}
