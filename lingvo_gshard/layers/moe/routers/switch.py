"""Switch: one expert per token (Fedus et al. 2021, arXiv 2101.03961)."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.capacity import Choice
from lingvo_gshard.layers.moe.routers import selection
from lingvo_gshard.layers.moe.routers.linear import SoftmaxRouter
from lingvo_gshard.layers.moe.routing import TokenChoiceRouting, WeightedLoss


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
        expert_GS, chosen_GSE = selection.top_1(gates_GSE)
        choice = Choice(expert_GS, selection.value_at(gates_GSE, chosen_GSE), mask_GS, mask_GS)
        loss = self.auxiliary_loss(theta, gates_GSE, chosen_GSE * mask_GS[..., None], mask_GS)
        losses = {"auxiliary_loss": WeightedLoss(loss, self.p.auxiliary_loss_weight)}
        losses.update(self.z_loss(logits_GSE, mask_GS))
        capacity = self.capacity(x_GSM.shape[1])
        return self.route([choice], capacity, losses, self.metrics(gates_GSE, mask_GS))
