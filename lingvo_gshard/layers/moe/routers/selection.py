"""Top-k selection over experts, which yields the one-hots that routers need."""

from __future__ import annotations

from typing import Any, TypeAlias

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.core.lazy import gen_xla_ops, tf
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe.routers.router import Router, RouterPart
from lingvo_gshard.sharding import annotate, hardware_of, platform_in_use

LOCAL_LETTERS = {"k": "choices of a token"}

# A score and its expert.
Pair: TypeAlias = "tuple[tf.Tensor, ...]"

# Smaller than any score.
_EXCLUDED = -float("inf")


def top_1(
    scores_GSE: tf.Tensor, excluded_GSE: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the expert with the largest score. Ties go to the first expert.

    Args:
      excluded_GSE: larger than 0 at experts that must not be selected.

    Returns:
      Its index, int32 [G,S], and its one-hot, float32 [G,S,E].
    """
    if excluded_GSE is not None:
        scores_GSE = tf.where(excluded_GSE > 0, _EXCLUDED, scores_GSE)
    expert_GS = tf.argmax(scores_GSE, -1, output_type=tf.int32)
    return expert_GS, _one_hot(expert_GS, scores_GSE.shape[-1])


def top_k(scores_GSE: tf.Tensor, k: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns (index, one-hot) of the k largest scores, largest first; see `top_1`."""
    if k > 1 and hardware_of(platform_in_use()) == "cuda":
        experts = best_experts(scores_GSE, k)
        return [(one_GS, _one_hot(one_GS, scores_GSE.shape[-1])) for one_GS in experts]
    selected: list[tuple[tf.Tensor, tf.Tensor]] = []
    excluded_GSE = None
    for _ in range(k):
        selected.append(top_1(scores_GSE, excluded_GSE))
        excluded_GSE = sum_of_one_hots(selected)
    return selected


def best_experts(scores_GSE: tf.Tensor, k: int) -> list[tf.Tensor]:
    """Returns the experts of `top_k`, int32 [G,S] each, by one reduction that merges sorted lists.

    XLA for GPUs computes it as one kernel, which reads the scores once. k rounds of `top_1` are as
    many kernels. TPUs reduce the last dimension by rotating rows, so that a long list is slower.
    """
    count, experts = 1 << (k - 1).bit_length(), scores_GSE.shape[-1]
    dtype = scores_GSE.dtype
    pairs = [tf.TensorSpec([], dtype), tf.TensorSpec([], tf.int32)] * count

    def merge(*values: tf.Tensor) -> list[tf.Tensor]:
        pairs = list(zip(values[::2], values[1::2], strict=True))
        one, other = pairs[:count], pairs[: count - 1 : -1]
        # A bitonic sequence (Batcher 1968): each half of every list has the better ones first.
        best = [_ordered(*both)[0] for both in zip(one, other, strict=True)]
        distance = count // 2
        while distance:
            for i in (i for i in range(count) if not i & distance):
                best[i], best[i + distance] = _ordered(best[i], best[i + distance])
            distance //= 2
        return [x for each in best for x in each]

    reducer = tf.function(merge, autograph=False).get_concrete_function(*pairs, *pairs)
    scores_GSE = tf.stop_gradient(scores_GSE)
    index_GSE = tf.broadcast_to(tf.range(experts), scores_GSE.shape)
    start = [tf.constant(_EXCLUDED, dtype), tf.constant(experts)]
    nothing = [tf.fill(scores_GSE.shape, value) for value in start]
    found: Any = gen_xla_ops.xla_variadic_reduce_v2(
        [scores_GSE, index_GSE, *nothing * (count - 1)],
        start * count,
        dimensions_to_reduce=[scores_GSE.shape.rank - 1],
        reducer=reducer,
    )
    # There is no expert `experts`, which only scores that are no numbers leave.
    return [tf.minimum(expert_GS, experts - 1) for expert_GS in found[1 : 2 * k : 2]]


def _ordered(one: Pair, other: Pair) -> tuple[Pair, Pair]:
    """Returns two scalar pairs of a score and an expert, the larger score first; see `top_1`."""
    is_first = (one[0] > other[0]) | (tf.equal(one[0], other[0]) & (one[1] < other[1]))
    pairs = list(zip(one, other, strict=True))
    first = tuple(tf.where(is_first, x, y) for x, y in pairs)
    return first, tuple(tf.where(is_first, y, x) for x, y in pairs)


def _one_hot(expert_GS: tf.Tensor, num_experts: int) -> tf.Tensor:
    return annotate(tf.one_hot(expert_GS, num_experts), "GSE")


def settled(
    router: Router, selected: list[tuple[tf.Tensor, tf.Tensor]]
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns the experts of each token: a router's selection, or what a replay gives.

    Args:
      selected: (index, one-hot) of each expert, as `top_k` returns them.
    """
    on_choice = token_context.current().on_choice
    return on_choice.select(router, selected) if on_choice else selected


def sum_of_one_hots(selected: list[tuple[tf.Tensor, tf.Tensor]]) -> tf.Tensor:
    """Returns [G,S,E]: 1 at every selected expert, 0 elsewhere."""
    return tf.add_n([one_hot_GSE for _, one_hot_GSE in selected])


def value_at(values_GSE: tf.Tensor, one_hot_GSE: tf.Tensor) -> tf.Tensor:
    """Returns [G,S]: the value at the selected expert of each token."""
    return tf.reduce_sum(values_GSE * one_hot_GSE, -1)


def values_at(
    values_GSE: tf.Tensor, selected: list[tuple[tf.Tensor, tf.Tensor]]
) -> list[tf.Tensor]:
    """Returns `value_at` of each of the selected experts, by one reduction."""
    expert_GSk = tf.stack([expert_GS for expert_GS, _ in selected], -1)
    is_at_GSkE = tf.one_hot(expert_GSk, values_GSE.shape[-1])
    return tf.unstack(tf.reduce_sum(values_GSE[:, :, tf.newaxis] * is_at_GSkE, -1), axis=-1)


class TopK(RouterPart):
    """Selects the k experts with the largest scores.

    Attributes:
      epsilon: added to the sum that `normalize` divides gates by.
    """

    def __init__(self, epsilon: float = 0.0):
        self.epsilon = epsilon

    def define(self, p: Params) -> None:
        """Defines k and the scaling of gates; see `RouterPart.define`."""
        p.define("k", 2, "Number of experts per token.", minimum=1)
        p.define("normalize", True, "Whether to divide a token's gates by their sum.")
        p.define("scale", 1.0, "Factor of the gates, after normalization.", minimum=0)

    def create(self) -> None:
        """Checks that the options do not contradict each other; see `RouterPart.create`."""
        path = self.path
        if self.p.k == 1 and self.p.normalize:
            raise UserError(
                f"{path}.k=1 with {path}.normalize=True: every gate would be {path}.scale, so the "
                f"router could not learn; set {path}.normalize=False"
            )

    def select(self, scores_GSE: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns (index, one-hot) of each token's k experts, best first; see `top_1`."""
        return settled(self.router, top_k(scores_GSE, self.p.k))

    def gates(
        self, values_GSE: tf.Tensor, selected: list[tuple[tf.Tensor, tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Returns the gate [G,S] of each choice, normalized and scaled by the options.

        Args:
          values_GSE: the gates before that.
          selected: the choices, of `select`.
        """
        p = self.p
        gates = values_at(values_GSE, selected)
        if p.normalize:
            sum_GS = tf.add_n(gates)
            if self.epsilon:
                sum_GS += self.epsilon
            gates = [gate_GS / sum_GS for gate_GS in gates]
        return gates if p.scale == 1.0 else [gate_GS * p.scale for gate_GS in gates]
