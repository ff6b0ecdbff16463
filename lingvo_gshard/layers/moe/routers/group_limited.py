"""Group-limited choosing: a token's experts come from a few groups of experts, as devices are.

Experts stand in d groups of E/d, one after another. A token picks its best groups and then its
experts within them, so that it travels to few devices. A group is as good as its largest score
(DeepSeek-V2, arXiv 2405.04434, section 2.2.2), or as the sum of its largest few (DeepSeek-V3, arXiv
2412.19437, section 2.1.2: of k / groups_per_token).
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe import choosing
from lingvo_gshard.layers.moe.router import Router

_EXCLUDED = -float("inf")

LOCAL_LETTERS = {"d": "groups of experts (devices)", "e": "experts of one group"}


def define(p: Params, scores_per_group: int = 1) -> None:
    """Adds the options to a router's Params; off where expert_groups is 0."""
    p.define("expert_groups", 0, "How many groups (devices) experts stand in; 0: no limit.")
    p.define("groups_per_token", 0, "From how many of them a token's experts may come.")
    p.define(
        "scores_per_group",
        scores_per_group,
        "A group is judged by the sum of that many of its largest scores.",
    )


def check(router: Router, k: int, k_name: str = "k") -> None:
    """Raises ValueError, naming both options, where those of a router do not go together.

    k: how many experts a token gets, by the hyperparameter of name `k_name`.
    """
    p, path = router.p, router.path
    if not p.expert_groups:
        if p.groups_per_token:
            raise ValueError(
                f"{path}.groups_per_token={p.groups_per_token} of {path}.expert_groups=0; "
                "say how many groups there are"
            )
        return
    router.check_range("expert_groups", 1)
    if p.num_experts % p.expert_groups:
        raise ValueError(
            f"{path}.expert_groups={p.expert_groups} does not divide "
            f"{path}.num_experts={p.num_experts}"
        )
    group_size = p.num_experts // p.expert_groups
    if not 1 <= p.groups_per_token <= p.expert_groups:
        raise ValueError(
            f"{path}.groups_per_token={p.groups_per_token} of "
            f"{path}.expert_groups={p.expert_groups}; 1 to {p.expert_groups} was expected"
        )
    if not 1 <= p.scores_per_group <= group_size:
        raise ValueError(
            f"{path}.scores_per_group={p.scores_per_group} with {path}.expert_groups="
            f"{p.expert_groups} of {group_size} experts; 1 to {group_size} was expected"
        )
    if k > p.groups_per_token * group_size:
        raise ValueError(
            f"{path}.{k_name}={k} experts of {path}.groups_per_token={p.groups_per_token} groups "
            f"of {group_size} experts; {p.groups_per_token * group_size} at most was expected"
        )


def limited_as(p: Params, scores_GSE: tf.Tensor) -> tf.Tensor:
    """Returns what `limited` does with a router's options; the scores where they are off."""
    if not p.expert_groups:
        return scores_GSE
    return limited(scores_GSE, p.expert_groups, p.groups_per_token, p.scores_per_group)


def limited(
    scores_GSE: tf.Tensor, expert_groups: int, groups_per_token: int, by: int = 1
) -> tf.Tensor:
    """Returns the scores of the experts in each token's best groups, and -inf at all others.

    by: a group is judged by the sum of its `by` largest scores. For choosing only: a product of
    -inf with the 0 of a one-hot is not a number.
    """
    groups, tokens, experts = scores_GSE.shape.as_list()
    if groups_per_token == expert_groups:
        return scores_GSE
    scores_GSde = tf.reshape(scores_GSE, (groups, tokens, expert_groups, experts // expert_groups))
    chosen = choosing.best_few(_sum_of_largest(scores_GSde, by), groups_per_token)
    allowed_GSd = tf.add_n([one_hot_GSd for _, one_hot_GSd in chosen])
    limited_GSde = tf.where(allowed_GSd[..., None] > 0, scores_GSde, _EXCLUDED)
    return tf.reshape(limited_GSde, (groups, tokens, experts))


def _sum_of_largest(scores: tf.Tensor, count: int) -> tf.Tensor:
    """The sum of the `count` largest along the last dimension, which is short: without sorting."""
    total = tf.zeros(())
    for index in range(count):
        total += tf.reduce_max(scores, -1)
        if index + 1 < count:
            largest = tf.one_hot(tf.argmax(scores, -1), scores.shape[-1])
            scores = tf.where(largest > 0, _EXCLUDED, scores)
    return total
