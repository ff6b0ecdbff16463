"""Forced balance: sets the experts' loads regardless of the weights, for benchmarks."""

from __future__ import annotations

from lingvo_gshard.core import NestedMap, Params, layer_method, tf
from lingvo_gshard.layers import (
    Choice,
    LinearScores,
    Router,
    TokenCapacity,
    TokenChoiceRouting,
    gate_metrics,
    selection,
)
from lingvo_gshard.sharding import annotate


class ForcedBalanceRouter(Router):
    """Sends the real tokens of a group to the experts round-robin.

    Token s goes to experts (s k + i) mod E for i < k. Gates are the learned softmax at these
    experts, so that the router has the cost of a learned one without the top-k selection. `skew`
    is the fraction of tokens, evenly spaced, sent to expert 0 and to k - 1 other experts in turn.
    """

    scores = LinearScores()
    capacity = TokenCapacity()
    experts_per_token_option = "k"
    is_learned = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("k", 2, "Number of experts per token.", minimum=1)
        p.define("skew", 0.0, "Share of the tokens sent to expert 0.", minimum=0, maximum=1)
        return p

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        gates_GSE = tf.nn.softmax(self.scores.logits(theta, x_GSM))
        choices = []
        for expert_GS in self._experts(mask_GS):
            chosen_GSE = annotate(tf.one_hot(expert_GS, self.p.num_experts), "GSE")
            gate_GS = selection.value_at(gates_GSE, chosen_GSE)
            choices.append(Choice(expert_GS, gate_GS, mask_GS, mask_GS))
        return self.capacity.route(choices, metrics=gate_metrics(gates_GSE, mask_GS))

    def _experts(self, mask_GS: tf.Tensor) -> list[tf.Tensor]:
        """Returns k tensors int32 [G,S]: the experts of each token."""
        k, experts, skew = self.p.k, self.p.num_experts, self.p.skew
        token_GS = tf.cumsum(mask_GS, axis=1, exclusive=True)
        skewed_before_GS = tf.floor(token_GS * skew)
        is_skewed_GS = tf.floor((token_GS + 1.0) * skew) > skewed_before_GS
        skewed_GS = tf.cast(skewed_before_GS, tf.int32)
        other_GS = tf.cast(token_GS, tf.int32) - skewed_GS
        chosen = [(other_GS * k + i) % experts for i in range(k)]
        if not skew:
            return chosen
        first = [tf.zeros_like(skewed_GS)]
        after = [1 + (skewed_GS * (k - 1) + i) % (experts - 1) for i in range(k - 1)]
        pairs = zip(first + after, chosen, strict=True)
        return [tf.where(is_skewed_GS, one, other) for one, other in pairs]
