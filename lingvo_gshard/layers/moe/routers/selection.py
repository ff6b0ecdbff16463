"""Top-k selection over experts by repeated argmax, which yields the one-hots that routers need."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe.routers.router import Part, Router
from lingvo_gshard.sharding import annotate

# Smaller than any score.
_EXCLUDED = -float("inf")


def top_1(
    scores_GSE: tf.Tensor, excluded_GSE: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the expert with the largest score. Ties go to the first expert.

    Args:
      scores_GSE: the score of each expert for each token.
      excluded_GSE: larger than 0 at experts that must not be selected.

    Returns:
      Its index, int32 [G,S], and its one-hot, float32 [G,S,E].
    """
    if excluded_GSE is not None:
        scores_GSE = tf.where(excluded_GSE > 0, _EXCLUDED, scores_GSE)
    expert_GS = tf.argmax(scores_GSE, -1, output_type=tf.int32)
    return expert_GS, annotate(tf.one_hot(expert_GS, scores_GSE.shape[-1]), "GSE")


def top_k(scores_GSE: tf.Tensor, k: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns (index, one-hot) of the k largest scores, largest first; see `top_1`."""
    selected: list[tuple[tf.Tensor, tf.Tensor]] = []
    excluded_GSE = None
    for _ in range(k):
        selected.append(top_1(scores_GSE, excluded_GSE))
        excluded_GSE = sum_of_one_hots(selected)
    return selected


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


class TopK(Part):
    """Selects the k experts with the largest scores.

    Attributes:
      epsilon: added to the sum that `normalize` divides gates by.
    """

    def __init__(self, epsilon: float = 0.0):
        self.epsilon = epsilon

    def define(self, p: Params) -> None:
        """Defines k and the scaling of gates; see `Part.define`."""
        p.define("k", 2, "Number of experts per token.", minimum=1)
        p.define("normalize", True, "Whether to divide a token's gates by their sum.")
        p.define("scale", 1.0, "Factor of the gates, after normalization.", minimum=0)

    def create(self) -> None:
        """Checks that the options do not contradict each other; see `Part.create`."""
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
        gates = [value_at(values_GSE, one_hot_GSE) for _, one_hot_GSE in selected]
        if p.normalize:
            sum_GS = tf.add_n(gates)
            if self.epsilon:
                sum_GS += self.epsilon
            gates = [gate_GS / sum_GS for gate_GS in gates]
        return gates if p.scale == 1.0 else [gate_GS * p.scale for gate_GS in gates]
