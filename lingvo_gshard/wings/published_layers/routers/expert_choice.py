"""Expert choice: each expert chooses the tokens with the largest gates (arXiv 2202.09368)."""

from __future__ import annotations

from lingvo_gshard.core import NestedMap, Params, UserError, custom_gradient, layer_method, tf
from lingvo_gshard.layers import (
    Capacity,
    ExpertChoiceRouting,
    LinearScores,
    Router,
    expert_capacity,
    gate_metrics,
)
from lingvo_gshard.sharding import annotate

# Score of padding, smaller than any gate.
_PADDING = -1.0


class ExpertCapacity(Capacity):
    """Says how many tokens each expert chooses, so that loads are even by construction."""

    def define(self, p: Params) -> None:
        """Defines the number of tokens; see `RouterPart.define`."""
        p.define("capacity_factor", 2.0, "Mean number of experts per token.", above=0)
        p.define(
            "evaluation_capacity_factor",
            0.0,
            "The factor outside of training. With E every expert takes every token; 0 uses the "
            "factor of training.",
            minimum=0,
        )
        p.define("minimum_capacity", 1, "Fewest tokens of a group that an expert takes.", minimum=1)

    def create(self) -> None:
        """Checks the options; see `RouterPart.create`."""
        for name in self.FACTORS:
            if self.p.get(name) > self.p.num_experts:
                raise UserError(
                    f"{self.path}.{name}: {self.p.get(name)}; 0 to {self.p.num_experts} was "
                    "expected, the number of experts"
                )

    def size(self, tokens: int) -> int:
        """Returns C, how many of a group's `tokens` an expert chooses in the current pass."""
        p = self.p
        return expert_capacity(tokens, p.num_experts, self.factor, at_least=p.minimum_capacity)


class ExpertChoiceRouter(Router):
    """Gives each expert its C = S * capacity_factor / E best tokens of a group.

    Zhou et al. 2022 (arXiv 2202.09368, section 3.2). Gates are each token's softmax over experts.
    A token may have any number of experts, from none to all. Loads are balanced by construction,
    without an auxiliary loss. Whether an expert chooses a token also depends on later tokens.
    """

    scores = LinearScores()
    capacity = ExpertCapacity()
    experts_per_token_option = "capacity_factor"
    is_learned = True
    sees_later_tokens = True

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> ExpertChoiceRouting:
        """Returns the routing of x. Experts do not choose tokens whose float32 mask is 0."""
        logits_GSE = self.scores.logits(theta, x_GSM)
        gates_GSE = annotate(tf.nn.softmax(logits_GSE), "GSE")
        scores_GSE = tf.where(mask_GS[..., None] > 0, gates_GSE, _PADDING)
        order_GES = tokens_by_score(tf.transpose(scores_GSE, (0, 2, 1)))
        tokens = x_GSM.shape[1]
        capacity = self.capacity.size(tokens)
        token_GEC = annotate(order_GES[..., :capacity], "GEC")
        rank_GES = tf.argsort(order_GES)
        is_real_GEC = tf.gather(mask_GS, token_GEC, batch_dims=1) > 0
        gate_GEC = _gather_first(tf.transpose(gates_GSE, (0, 2, 1)), order_GES, rank_GES, capacity)
        return ExpertChoiceRouting(
            token_of_slot_GEC=tf.where(is_real_GEC, token_GEC, tokens),
            gate_of_slot_GEC=annotate(tf.where(is_real_GEC, gate_GEC, 0.0), "GEC"),
            is_taken_GS=tf.reduce_any(rank_GES < capacity, 1) & (mask_GS > 0),
            num_experts=self.p.num_experts,
            capacity=capacity,
            losses=self.scores.losses(logits_GSE, mask_GS),
            metrics=gate_metrics(gates_GSE, mask_GS),
        )


def tokens_by_score(scores_GES: tf.Tensor) -> tf.Tensor:
    """Returns the tokens int32 [G,E,S] in descending order of score. Ties keep the order of tokens.

    No strategy splits S, so the sort is local.
    """
    order_GES = tf.argsort(scores_GES, direction="DESCENDING", stable=True)
    return annotate(order_GES, "GES")


def _gather_first(
    values_GES: tf.Tensor, order_GES: tf.Tensor, rank_GES: tf.Tensor, count: int
) -> tf.Tensor:
    """Returns [G,E,C], the values of the first `count` tokens in order.

    `rank_GES`, the inverse of the order, makes the gradient of this gather a gather as well.
    """

    @custom_gradient
    def gather(values_GES: tf.Tensor):
        def gradient(d_GEC: tf.Tensor) -> tf.Tensor:
            at_rank_GES = tf.gather(d_GEC, tf.minimum(rank_GES, count - 1), batch_dims=2)
            return tf.where(rank_GES < count, at_rank_GES, 0.0)

        return tf.gather(values_GES, order_GES[..., :count], batch_dims=2), gradient

    return gather(values_GES)
