"""The paper's router: group-level top-2 gating (arXiv 2006.16668, Algorithm 1)."""

import tensorflow as tf

from lingvo_gshard.core import context, initializers, names, random_numbers
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.params import Params
from lingvo_gshard.layers.moe.routing import Choice, Routing, expert_capacity
from lingvo_gshard.sharding import annotate, einsum

_MODES = ("paper", "lingvo")
_SECOND_EXPERT_POLICIES = ("random", "all")


class Top2Router(Layer):
    """Sends every token to its two best experts, first choices first, until the buffers are full.

    In training the second expert is used with probability min(1, 2 * gate); in evaluation always,
    so that evaluation is deterministic. The modes differ as Google's code differs from the paper:

                            paper                          lingvo
    gates                   divided by their sum           divided by sum + 1e-9
    rejected second choice  takes a place all the same     takes none
    auxiliary loss          mean over E of c_e / S * m_e   E^2 times that: 1 for uniform routing
    capacity                int(S * factor / E)            rounded up to a multiple of 4
    """

    experts_per_token = 2

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.")
        p.define("num_experts", 0, "Size of E; at least 2.")
        p.define("mode", "paper", "'paper' or 'lingvo'.")
        p.define("capacity_factor", 2.0, "An expert takes S * factor / E tokens of a group.")
        p.define(
            "evaluation_capacity_factor",
            0.0,
            "The factor outside of training; E drops no token; 0 for capacity_factor.",
        )
        p.define("second_expert", "random", "Policy in training: 'random' or 'all'.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        if p.num_experts < 2:
            raise ValueError(f"{path}.num_experts: {p.num_experts}; top-2 routing needs 2 or more")
        for name, valid in (("mode", _MODES), ("second_expert", _SECOND_EXPERT_POLICIES)):
            if p.get(name) not in valid:
                raise ValueError(
                    f"{path}.{name}: {p.get(name)!r}. {names.nearest(p.get(name), valid)}"
                )
        for name in ("capacity_factor", "evaluation_capacity_factor"):
            if p.get(name) < 0 or (name == "capacity_factor" and p.get(name) == 0):
                raise ValueError(f"{path}.{name}: {p.get(name)}; a positive factor was expected")
        sizes = {"M": p.model_dim, "E": p.num_experts}
        # The paper replicates the router's weight (section 3.2): every group sees every expert.
        init = initializers.fan_in(p.model_dim)
        self.create_variable("w_gate", "ME", sizes, init, unsplit="E")

    def capacity(self, tokens: int) -> int:
        """Returns C for groups of `tokens` in the pass under way."""
        p = self.p
        factor = p.capacity_factor
        if not context.current().training and p.evaluation_capacity_factor:
            factor = p.evaluation_capacity_factor
        return expert_capacity(tokens, p.num_experts, factor, 4 if p.mode == "lingvo" else 1)

    def fprop(self, theta: NestedMap, x_GSM: tf.Tensor, mask_GS: tf.Tensor) -> Routing:
        """Returns the Routing of x; tokens whose float32 mask is 0 go nowhere and count nowhere."""
        x_float = tf.cast(x_GSM, tf.float32)
        logits_GSE = einsum("GSM,ME->GSE", x_float, tf.cast(theta.w_gate, tf.float32))
        gates_GSE = tf.nn.softmax(logits_GSE)
        first_GS, first_gate_GS, first_GSE = _best(gates_GSE)
        second_GS, second_gate_GS, second_GSE = _best(gates_GSE, excluded_GSE=first_GSE)
        first_GSE *= mask_GS[..., None]
        second_GSE *= mask_GS[..., None]
        sum_GS = first_gate_GS + second_gate_GS + (1e-9 if self.p.mode == "lingvo" else 0.0)
        first_gate_GS, second_gate_GS = first_gate_GS / sum_GS, second_gate_GS / sum_GS

        wants_second_GS = self._wants_second(second_gate_GS) * mask_GS
        if self.p.mode == "lingvo":
            second_GSE *= wants_second_GS[..., None]
        capacity = self.capacity(x_GSM.shape[1])
        load_GE = tf.reduce_sum(first_GSE, axis=1)
        first = _choice(first_GS, first_GSE, first_gate_GS, 0.0, mask_GS, capacity)
        second = _choice(
            second_GS, second_GSE, second_gate_GS, load_GE[:, None], wants_second_GS, capacity
        )
        auxiliary_loss = self._auxiliary_loss(gates_GSE, load_GE, mask_GS)
        return Routing((first, second), self.p.num_experts, capacity, auxiliary_loss)

    def _wants_second(self, second_gate_GS: tf.Tensor) -> tf.Tensor:
        """1 where the second expert is to be used, drawn with probability 2 * gate in training."""
        if not context.current().training or self.p.second_expert == "all":
            return tf.ones_like(second_gate_GS)
        seed = self.random_seed("second_expert")
        drawn_GS = random_numbers.hashed_uniform(second_gate_GS.shape, seed)
        return tf.cast(2 * second_gate_GS > drawn_GS, tf.float32)

    def _auxiliary_loss(
        self, gates_GSE: tf.Tensor, load_GE: tf.Tensor, mask_GS: tf.Tensor
    ) -> tf.Tensor:
        """Mean over groups of the mean over experts of (c_e / S) * m_e; S counts real tokens."""
        tokens_G1 = tf.maximum(tf.reduce_sum(mask_GS, axis=1), 1.0)[:, None]
        mean_gate_GE = tf.reduce_sum(gates_GSE * mask_GS[..., None], axis=1) / tokens_G1
        loss = tf.reduce_mean(tf.stop_gradient(load_GE) / tokens_G1 * mean_gate_GE)
        return loss * (self.p.num_experts**2 if self.p.mode == "lingvo" else 1.0)


def _best(gates_GSE: tf.Tensor, excluded_GSE: tf.Tensor | None = None) -> tuple:
    """(index [G,S], gate [G,S], one-hot [G,S,E]) of the largest gate not excluded."""
    scores_GSE = gates_GSE if excluded_GSE is None else tf.where(excluded_GSE > 0, -1.0, gates_GSE)
    expert_GS = tf.argmax(scores_GSE, -1, output_type=tf.int32)
    chosen_GSE = tf.one_hot(expert_GS, gates_GSE.shape[-1])
    gate_GS = tf.reduce_sum(gates_GSE * chosen_GSE, -1)
    return expert_GS, gate_GS, annotate(chosen_GSE, "GSE")


def _choice(
    expert_GS: tf.Tensor,
    counted_GSE: tf.Tensor,
    gate_GS: tf.Tensor,
    used_G1E: tf.Tensor | float,
    wanted_GS: tf.Tensor,
    capacity: int,
) -> Choice:
    """Places each token behind those counted before it, and after `used` places taken already.

    Counts are integers below 2^24, which float32 holds exactly.
    """
    before_GSE = tf.cumsum(counted_GSE, axis=1, exclusive=True) + used_G1E
    chosen_GSE = tf.one_hot(expert_GS, counted_GSE.shape[-1])
    position_GS = tf.cast(tf.reduce_sum(before_GSE * chosen_GSE, -1), tf.int32)
    kept_GS = (position_GS < capacity) & (wanted_GS > 0)
    return Choice(expert_GS, position_GS, tf.where(kept_GS, gate_GS, 0.0), kept_GS)
