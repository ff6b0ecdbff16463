"""Top-k: each token goes to the k experts with the largest gates."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.routers import group_limited
from lingvo_gshard.layers.moe.routers.router import SoftmaxRouter
from lingvo_gshard.layers.moe.routers.selection import sum_of_one_hots, top_1, top_k, value_at
from lingvo_gshard.layers.moe.routing import Choice, TokenChoiceRouting, WeightedLoss


class TopKRouter(SoftmaxRouter):
    """Sends each token to its k best experts. First choices get slots before second choices.

    The gate is the expert's probability in a softmax over all experts (Dai et al. 2024, arXiv
    2401.06066, section 2). With `normalize` the softmax is over the k selected experts only
    (Shazeer et al. 2017, arXiv 1701.06538, section 2.1; Mixtral, arXiv 2401.04088, section 2.1).
    In the auxiliary loss each choice counts for 1/k of a token, so that balanced loads give 1.

    For a second choice that depends on its gate use Top2Router's `second_expert`.
    """

    experts_per_token_option = "k"

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("k", 2, "Number of experts per token.", minimum=1)
        p.define("normalize", True, "Whether to divide the selected gates by their sum.")
        p.define("scale", 1.0, "Factor of the gates, after normalization.", minimum=0)
        group_limited.define(p)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.k == 1 and p.normalize:
            raise UserError(
                f"{path}.k=1 with {path}.normalize=True: every gate would be 1, so the router "
                f"could not learn; set {path}.normalize=False"
            )
        group_limited.check(self, p.k)

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
        gates_GSE = tf.nn.softmax(logits_GSE)
        selected = top_k(group_limited.limit_by_params(p, gates_GSE), p.k)
        values = [value_at(gates_GSE, one_hot_GSE) for _, one_hot_GSE in selected]
        if p.normalize:
            sum_GS = tf.add_n(values)
            values = [value_GS / sum_GS for value_GS in values]
        if p.scale != 1.0:
            values = [value_GS * p.scale for value_GS in values]
        choices = [
            Choice(expert_GS, value_GS, mask_GS, mask_GS)
            for (expert_GS, _), value_GS in zip(selected, values, strict=True)
        ]
        counted_GSE = sum_of_one_hots(selected) / p.k
        loss = self.auxiliary_loss(theta, gates_GSE, counted_GSE * mask_GS[..., None], mask_GS)
        losses = {"auxiliary_loss": WeightedLoss(loss, p.auxiliary_loss_weight)}
        losses.update(self.z_loss(logits_GSE, mask_GS))
        capacity = self.capacity(x_GSM.shape[1])
        return self.route(choices, capacity, losses, self.metrics(gates_GSE, mask_GS))


class SwitchRouter(SoftmaxRouter):
    """Sends each token to its best expert; the gate is the expert's softmax probability.

    Section 2.1 and equations 1 to 4 of the paper, with its jitter and capacity factor. With a
    dropless dispatch set capacity_factor to 0.
    """

    @classmethod
    def params(cls) -> Params:
        return super().params().set(jitter=1e-2, capacity_factor=1.25)

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        """Returns 1; see `Router.experts_per_token`."""
        return 1

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        """Returns the routing of a batch; see `Router.fprop`."""
        logits_GSE = self.logits(theta, x_GSM)
        gates_GSE = tf.nn.softmax(logits_GSE)
        expert_GS, chosen_GSE = top_1(gates_GSE)
        choice = Choice(expert_GS, value_at(gates_GSE, chosen_GSE), mask_GS, mask_GS)
        loss = self.auxiliary_loss(theta, gates_GSE, chosen_GSE * mask_GS[..., None], mask_GS)
        losses = {"auxiliary_loss": WeightedLoss(loss, self.p.auxiliary_loss_weight)}
        losses.update(self.z_loss(logits_GSE, mask_GS))
        capacity = self.capacity(x_GSM.shape[1])
        return self.route([choice], capacity, losses, self.metrics(gates_GSE, mask_GS))
