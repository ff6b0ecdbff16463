"""Forced balance: loads as wanted whatever the weights, for benchmarks."""

import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import choosing
from lingvo_gshard.layers.moe.balance import entropy
from lingvo_gshard.layers.moe.gates import LearnedRouter
from lingvo_gshard.layers.moe.places import Pick
from lingvo_gshard.layers.moe.routing import Routing
from lingvo_gshard.sharding import annotate


class ForcedBalanceRouter(LearnedRouter):
    """Sends the real tokens of a group to k experts in turn: token s to (s k + i) mod E, i < k.

    Gates are the learned softmax at these experts, so that the router's product and its gradient
    cost what they do elsewhere; only the search for the largest gates is missing. With `skew`, that
    share of the tokens, spread evenly, goes to expert 0 first, and to k - 1 of the others in turn.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("k", 2, "How many experts a token gets.")
        p.define("skew", 0.0, "Share of the tokens that expert 0 gets before all are dealt out.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.check_range("k", 1)
        self.check_range("skew", 0, 1)

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> Routing:
        """Returns the Routing of x; tokens whose float32 mask is 0 go nowhere and count nowhere."""
        gates_GSE = tf.nn.softmax(self.logits(theta, x_GSM))
        picks = []
        for expert_GS in self._experts(mask_GS):
            chosen_GSE = annotate(tf.one_hot(expert_GS, self.p.num_experts), "GSE")
            gate_GS = choosing.value_at(gates_GSE, chosen_GSE)
            picks.append(Pick(expert_GS, gate_GS, mask_GS, mask_GS))
        metrics = {"router_entropy": entropy(gates_GSE, mask_GS)}
        return self.route(picks, self.capacity(x_GSM.shape[1]), metrics=metrics)

    def _experts(self, mask_GS: tf.Tensor) -> list[tf.Tensor]:
        """The k experts of each token, int32 [G,S]."""
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
