"""Group-limited selection: a token's experts come from a few groups of experts.

The experts form d groups of e consecutive experts, typically one group for each device. A token
selects its best groups and then experts within these groups. The token is therefore sent to few
devices. The score of a group is the largest score of its experts (DeepSeek-V2, arXiv 2405.04434,
section 2.2.2), or the sum of the k / groups_per_token largest scores (DeepSeek-V3, arXiv
2412.19437, section 2.1.2).
"""

from __future__ import annotations

from lingvo_gshard.core import Params, UserError, tf
from lingvo_gshard.layers import TopKRouter, selection

_EXCLUDED = -float("inf")

LOCAL_LETTERS = {"d": "groups of experts (devices)", "e": "experts of one group"}


class LimitedTopK(selection.TopK):
    """Selects the k experts with the largest scores, from all experts or from a few groups.

    A single expert may have a normalized gate, which is constant: published models have such ones.

    Attributes:
      scores_per_group: default of the option with that name.
    """

    def __init__(self, scores_per_group: int = 1, epsilon: float = 0.0):
        super().__init__(epsilon)
        self.scores_per_group = scores_per_group

    def define(self, p: Params) -> None:
        """Defines the options of `TopK`, and the groups; see `RouterPart.define`."""
        super().define(p)
        p.define("expert_groups", 0, "Number of groups of experts; 0: no limit.", minimum=0)
        p.define("groups_per_token", 0, "Groups that a token's experts may come from.", minimum=0)
        p.define(
            "scores_per_group",
            self.scores_per_group,
            "The score of a group is the sum of this many of its largest expert scores.",
            minimum=1,
        )

    def create(self) -> None:
        p, path = self.p, self.path
        if not p.expert_groups:
            if p.groups_per_token:
                raise UserError(
                    f"{path}.groups_per_token={p.groups_per_token} with {path}.expert_groups=0; "
                    "set the number of groups"
                )
            return
        if p.num_experts % p.expert_groups:
            raise UserError(
                f"{path}.expert_groups={p.expert_groups} does not divide "
                f"{path}.num_experts={p.num_experts}"
            )
        group_size = p.num_experts // p.expert_groups
        if not 1 <= p.groups_per_token <= p.expert_groups:
            raise UserError(
                f"{path}.groups_per_token={p.groups_per_token} of "
                f"{path}.expert_groups={p.expert_groups}; 1 to {p.expert_groups} was expected"
            )
        if not 1 <= p.scores_per_group <= group_size:
            raise UserError(
                f"{path}.scores_per_group={p.scores_per_group} with {path}.expert_groups="
                f"{p.expert_groups} of {group_size} experts; 1 to {group_size} was expected"
            )
        if p.k > p.groups_per_token * group_size:
            raise UserError(
                f"{path}.k={p.k} experts of {path}.groups_per_token={p.groups_per_token} groups "
                f"of {group_size} experts; {p.groups_per_token * group_size} at most was expected"
            )

    def select(self, scores_GSE: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        p = self.p
        if p.expert_groups:
            scores_GSE = limit(scores_GSE, p.expert_groups, p.groups_per_token, p.scores_per_group)
        return super().select(scores_GSE)


class GroupLimitedRouter(TopKRouter):
    """A `TopKRouter` whose experts of a token may come from a few groups of experts only."""

    selection = LimitedTopK()


def limit(
    scores_GSE: tf.Tensor, expert_groups: int, groups_per_token: int, scores_per_group: int = 1
) -> tf.Tensor:
    """Returns the scores with -inf at experts outside of each token's best groups.

    Use the result for selection only: -inf times the 0 of a one-hot is NaN.

    Args:
      groups_per_token: number of groups that a token's experts may come from.
      scores_per_group: the score of a group is the sum of this many of its largest expert scores.
    """
    groups, tokens, experts = scores_GSE.shape.as_list()
    if groups_per_token == expert_groups:
        return scores_GSE
    scores_GSde = tf.reshape(scores_GSE, (groups, tokens, expert_groups, experts // expert_groups))
    selected = selection.top_k(_sum_of_largest(scores_GSde, scores_per_group), groups_per_token)
    allowed_GSd = selection.sum_of_one_hots(selected)
    limited_GSde = tf.where(allowed_GSd[..., None] > 0, scores_GSde, _EXCLUDED)
    return tf.reshape(limited_GSde, (groups, tokens, experts))


def _sum_of_largest(scores: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the sum of the `count` largest values of the last dimension, without sorting."""
    total = tf.zeros(())
    for index in range(count):
        total += tf.reduce_max(scores, -1)
        if index + 1 < count:
            largest = tf.one_hot(tf.argmax(scores, -1), scores.shape[-1])
            scores = tf.where(largest > 0, _EXCLUDED, scores)
    return total
