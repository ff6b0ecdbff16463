"""Expert choice: each expert takes the tokens that suit it best (arXiv 2202.09368)."""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.balance import entropy
from lingvo_gshard.layers.moe.gates import LearnedLogits
from lingvo_gshard.layers.moe.routing import SlotRouting, expert_capacity
from lingvo_gshard.sharding import annotate

# Below any gate.
_LAST = -1.0


class ExpertChoiceRouter(LearnedLogits):
    """Has every expert take its C = S * capacity_factor / E best tokens of a group.

    Zhou et al. 2022 (arXiv 2202.09368, section 3.2). Gates are each token's softmax over experts.
    A token may have any number of experts, from none to all; loads are even by construction, with
    no auxiliary loss. Whether an expert takes a token depends on the tokens after it, too.
    """

    sees_later_tokens = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("capacity_factor", 2.0, "How many experts take a token, on average.")
        p.define(
            "evaluation_capacity_factor",
            0.0,
            "The factor outside of training; E has every expert take all; 0: that of training.",
        )
        p.define("minimum_capacity", 1, "An expert takes at least this many tokens of a group.")
        p.define("allow_causal", False, "Whether it may stand in a layer that is_causal.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        for name in ("capacity_factor", "evaluation_capacity_factor"):
            self._check_factor(name)
        if not self.p.capacity_factor:
            raise ValueError(f"{path}.capacity_factor: 0; more was expected")
        self.check_range("minimum_capacity", 1)

    def _check_factor(self, name: str) -> None:
        self.check_range(name, 0)
        if self.p.get(name) > self.p.num_experts:
            raise ValueError(
                f"{self.path}.{name}: {self.p.get(name):g} experts per token of "
                f"{self.path}.num_experts={self.p.num_experts}"
            )

    @classmethod
    def experts_per_token(cls, params: Params) -> float:
        """Returns the capacity factor, of training."""
        return params.capacity_factor

    def take_all(self) -> None:
        """Raises ValueError: what experts take is theirs to say, however they get it."""
        raise ValueError(
            f"{self.path}: {type(self).__name__} limits what experts take, by "
            f"{self.path}.capacity_factor={self.p.capacity_factor:g}, and dispatch='dropless' does "
            "not; choose another router or another dispatch"
        )

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> SlotRouting:
        """Returns the routing of x; tokens whose float32 mask is 0 are taken by no expert."""
        logits_GSE = self.logits(theta, x_GSM)
        gates_GSE = annotate(tf.nn.softmax(logits_GSE), "GSE")
        scores_GSE = tf.where(mask_GS[..., None] > 0, gates_GSE, _LAST)
        order_GES = best_first(tf.transpose(scores_GSE, (0, 2, 1)))
        tokens = x_GSM.shape[1]
        capacity = self.capacity(tokens)
        token_GEC = annotate(order_GES[..., :capacity], "GEC")
        rank_GES = tf.argsort(order_GES)
        is_real_GEC = tf.gather(mask_GS, token_GEC, batch_dims=1) > 0
        gate_GEC = _first(tf.transpose(gates_GSE, (0, 2, 1)), order_GES, rank_GES, capacity)
        return SlotRouting(
            token_of_slot_GEC=tf.where(is_real_GEC, token_GEC, tokens),
            gate_of_slot_GEC=annotate(tf.where(is_real_GEC, gate_GEC, 0.0), "GEC"),
            taken_GS=tf.reduce_any(rank_GES < capacity, 1) & (mask_GS > 0),
            num_experts=self.p.num_experts,
            capacity=capacity,
            losses=self.z_loss(logits_GSE, mask_GS),
            metrics={"router_entropy": entropy(gates_GSE, mask_GS)},
        )

    def capacity(self, tokens: int) -> int:
        """Returns C for groups of `tokens` in the pass under way."""
        p = self.p
        factor = p.capacity_factor
        if not context.current().training and p.evaluation_capacity_factor:
            factor = p.evaluation_capacity_factor
        return expert_capacity(tokens, p.num_experts, factor, at_least=p.minimum_capacity)


def best_first(scores_GES: tf.Tensor) -> tf.Tensor:
    """Returns the tokens int32 [G,E,S] by score, the largest first; of equal ones the earlier.

    No strategy splits S.
    """
    order_GES = tf.argsort(scores_GES, direction="DESCENDING", stable=True)
    return annotate(order_GES, "GES")


def _first(values_GES: tf.Tensor, order_GES: tf.Tensor, rank_GES: tf.Tensor, count: int):
    """Returns [G,E,C], the values of the first `count` tokens in order; rank is its inverse.

    By which the gradient of the gather is a gather, too.
    """

    @custom_gradient
    def pick(values_GES: tf.Tensor):
        def gradient(d_GEC: tf.Tensor) -> tf.Tensor:
            at_rank_GES = tf.gather(d_GEC, tf.minimum(rank_GES, count - 1), batch_dims=2)
            return tf.where(rank_GES < count, at_rank_GES, 0.0)

        return tf.gather(values_GES, order_GES[..., :count], batch_dims=2), gradient

    return pick(values_GES)
