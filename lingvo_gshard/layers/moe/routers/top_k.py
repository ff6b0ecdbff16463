"""Top-k: every token goes to the k experts whose gates are largest."""

import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import choosing
from lingvo_gshard.layers.moe.gates import SoftmaxRouter
from lingvo_gshard.layers.moe.places import Pick
from lingvo_gshard.layers.moe.routers import group_limited
from lingvo_gshard.layers.moe.routing import Routing, WeightedLoss


class TopKRouter(SoftmaxRouter):
    """Sends every token to its k best experts, all first choices before all second ones.

    A gate is the expert's share of a softmax over all of them (Dai et al. 2024, arXiv 2401.06066,
    section 2), or with `normalize` of one over those chosen, which is the softmax of the k largest
    logits (Shazeer et al. 2017, arXiv 1701.06538, section 2.1; Mixtral, arXiv 2401.04088, section
    2.1). All k choices count in the auxiliary loss, each for 1/k of a token, so that even loads
    give 1.

    Whether to leave out a choice whose gate is small is a matter of Top2Router's second_expert.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("k", 2, "How many experts a token gets.")
        p.define("normalize", True, "Whether the chosen gates are divided by their sum.")
        group_limited.define(p)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        self.check_range("k", 1)
        if p.k == 1 and p.normalize:
            raise ValueError(
                f"{path}.k=1 with {path}.normalize=True: a gate is 1 whatever the router's weight, "
                f"which could not learn from it; set {path}.normalize False"
            )
        group_limited.check(self, p.k)

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
        gates_GSE = tf.nn.softmax(logits_GSE)
        chosen = choosing.best_few(group_limited.limited_as(p, gates_GSE), p.k)
        values = [choosing.value_at(gates_GSE, one_hot_GSE) for _, one_hot_GSE in chosen]
        if p.normalize:
            sum_GS = tf.add_n(values)
            values = [value_GS / sum_GS for value_GS in values]
        picks = [
            Pick(expert_GS, value_GS, mask_GS, mask_GS)
            for (expert_GS, _), value_GS in zip(chosen, values, strict=True)
        ]
        counted_GSE = tf.add_n([one_hot_GSE for _, one_hot_GSE in chosen]) / p.k
        loss = self.auxiliary_loss(theta, gates_GSE, counted_GSE * mask_GS[..., None], mask_GS)
        losses = {"auxiliary_loss": WeightedLoss(loss, p.auxiliary_loss_weight)}
        losses.update(self.z_loss(logits_GSE, mask_GS))
        capacity = self.capacity(x_GSM.shape[1])
        return self.route(picks, capacity, losses, self.metrics(gates_GSE, mask_GS))
